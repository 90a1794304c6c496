"""What is handed from room to room: frozen, JSON, versioned."""
