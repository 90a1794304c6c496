"""What is refused before an accelerator is rented, a file is written or Prefect is started."""
