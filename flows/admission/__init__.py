"""What is refused before anything is rented, written or waited for."""
