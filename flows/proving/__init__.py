"""The proof behind `baton prove`: straight and cut, in processes of their own, compared bit by bit."""
