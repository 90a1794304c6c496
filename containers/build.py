"""Build Baton's container images, with podman or docker: `python containers/build.py [IMAGE ...] [-- OPTION ...]`.

Builds all images if none is named. Options after "--" are passed to the engine's `build`. The environment variable
BASE_IMAGE replaces the base image. Needs only the standard library.
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
# The Dockerfile target of each image. Its lock file has the image's name.
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
    """Return the command that builds one image.

    Args:
        engine: command of podman or docker, such as ["podman"].
        image: one of `TARGETS`.
        base: base image; None: the Dockerfile's default.
        tag: tag of the image baton/IMAGE.
        revision: commit for the label; None: the commit of the checkout.
        context: the checkout to build from.
        options: additional options of `build`.
    """
    arguments = {"IMAGE": image, "VERSION": version_of(context), "REVISION": revision or revision_of(context)}
    if base:
        arguments["BASE_IMAGE"] = base
    build_args = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    dockerfile = str(context / "containers" / "Dockerfile")
    target = ["--file", dockerfile, "--target", TARGETS[image], "--tag", f"baton/{image}:{tag}"]
    return [*engine, "build", *target, *build_args, *options, str(context)]


def version_of(checkout: Path) -> str:
    """Return Baton's version from pyproject.toml."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def revision_of(checkout: Path) -> str:
    """Return the commit of a checkout, with "-dirty" if files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--match=", "--dirty"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the named images.

    Returns:
        The exit code: 0, 2 if no engine is installed, or the engine's exit code.
    """
    parser = argparse.ArgumentParser(prog="containers/build.py", description="Build Baton's container images.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"{', '.join(TARGETS)}; default: all")
    parser.add_argument("--tag", default="latest", help="tag of the images; default: latest")
    parser.add_argument("--revision", help="commit for the label; default: the commit of the checkout")
    parser.add_argument("--base", default=os.environ.get("BASE_IMAGE"), help="base image")
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options, engine_options = parser.parse_args(words[:end]), words[end + 1 :]
    unknown = [name for name in options.images if name not in TARGETS]
    if unknown:
        parser.error(f"unknown image {unknown[0]}; choose from {', '.join(TARGETS)}")
    engine = next(filter(None, map(shutil.which, ("podman", "docker"))), None)
    if engine is None:
        sys.stderr.write("error: neither podman nor docker is installed; on Debian: apt-get install podman\n")
        return 2
    for image in options.images or TARGETS:
        command = build_command(
            [engine], image, base=options.base, tag=options.tag, revision=options.revision, options=engine_options
        )
        code = subprocess.run(command, check=False).returncode
        if code:
            sys.stderr.write(f"error: building baton/{image} failed\n")
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
