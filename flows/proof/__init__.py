"""Training executed again and compared bit by bit: `baton prove` in fresh runs, `baton audit` from committed steps."""
