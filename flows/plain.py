"""The former name of `flows.without_prefect`. Scripts that run `python -m flows.plain FILE` keep working."""

import runpy

if __name__ == "__main__":
    runpy.run_module("flows.without_prefect", run_name="__main__", alter_sys=True)
