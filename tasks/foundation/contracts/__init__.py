"""The values that rooms exchange: frozen, JSON, versioned."""
