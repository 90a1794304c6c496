"""Stage: staged checkpoint -> verified and committed; older ones retired."""
