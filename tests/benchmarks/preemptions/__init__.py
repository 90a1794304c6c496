"""Replays the same losses of machines against Baton, its peers, and an oracle that knows the future."""
