"""Build Baton's container images, with podman or docker: `python containers/build.py [IMAGE ...] [-- OPTION ...]`.

All of them if none is named. What follows "--" goes to the engine's `build` as it is. BASE_IMAGE, in the environment,
replaces the base. Only the standard library is needed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
# Which target of the Dockerfile makes an image; its lock bears the image's own name.
TARGETS = {
    "prepare-data": "image",
    "train-cpu": "image",
    "train-gpu": "image-gpu",
    "train-tpu": "image-tpu",
    "checkpoint": "image",
    "evaluate": "image",
    "orchestrator": "image",
}


def build_command(
    engine: Sequence[str],
    image: str,
    *,
    base: str | None = None,
    tag: str = "latest",
    revision: str | None = None,
    context: Path = CHECKOUT,
    options: Sequence[str] = (),
) -> list[str]:
    """The command that builds one image.

    Args:
        engine: how podman or docker is called, such as ["podman"].
        image: one of `TARGETS`.
        base: the image to start from; left out: the Dockerfile's own.
        tag: what follows baton/IMAGE and a colon.
        revision: the commit; left out: that of the checkout.
        context: the checkout to build from.
        options: further options of `build`.
    """
    arguments = {"IMAGE": image, "VERSION": version_of(context), "REVISION": revision or revision_of(context)}
    if base:
        arguments["BASE_IMAGE"] = base
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    dockerfile = str(context / "containers" / "Dockerfile")
    where = ["--file", dockerfile, "--target", TARGETS[image], "--tag", f"baton/{image}:{tag}"]
    return [*engine, "build", *where, *given, *options, str(context)]


def version_of(checkout: Path) -> str:
    """Baton's version, as pyproject.toml has it."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def revision_of(checkout: Path) -> str:
    """The commit of a checkout, with "-dirty" if files differ from it; "unknown" outside of one."""
    command = ["git", "describe", "--always", "--abbrev=40", "--match=", "--dirty"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the images that are named.

    Returns:
        The exit code: 0, 2 if no engine is there, or the engine's own.
    """
    parser = argparse.ArgumentParser(prog="containers/build.py", description="Build Baton's container images.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(TARGETS)}; left out: all")
    parser.add_argument("--tag", default="latest", help="left out: latest")
    parser.add_argument("--revision", help="left out: the commit of the checkout")
    parser.add_argument("--base", default=os.environ.get("BASE_IMAGE"), help="the image to start from")
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    options, of_engine = parser.parse_args(words[:cut]), words[cut + 1 :]
    unknown = [name for name in options.images if name not in TARGETS]
    if unknown:
        parser.error(f"no image {unknown[0]}; there are {', '.join(TARGETS)}")
    engine = next(filter(None, map(shutil.which, ("podman", "docker"))), None)
    if engine is None:
        sys.stderr.write("error: neither podman nor docker is installed; on Debian: apt-get install podman\n")
        return 2
    for image in options.images or TARGETS:
        command = build_command(
            [engine], image, base=options.base, tag=options.tag, revision=options.revision, options=of_engine
        )
        code = subprocess.run(command, check=False).returncode
        if code:
            sys.stderr.write(f"error: baton/{image} was not built\n")
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
