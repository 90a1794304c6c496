"""Tests mirror flows/ and tasks/; support/ and fakes/ hold what they share."""
