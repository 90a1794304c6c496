"""The TPU types that Google Cloud rents out, by the names that it gives them.

Sizes and memory are those of Google's documentation (cloud.google.com/tpu/docs: "System architecture", "v2" to "v6e",
as of 2025). Names count TensorCores for v2, v3, v4 and v5p, two a chip, and chips for v5e (`v5litepod-…`) and v6e.
TensorFlow sees a replica for each core of v2 and v3; the two cores of a v4 or v5p chip work as one, and v5e and v6e
have one. Gigabytes are taken as decimal, since the runtime keeps some of the memory for itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from tasks.foundation.errors import AcceleratorError

_GB = 10**9
_CHIPS_OF_A_HOST = 4
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuType:
    """What one TPU of this type consists of.

    Attributes:
        name: as `gcloud compute tpus tpu-vm create --accelerator-type` takes it.
        chips: in all.
        replicas: devices that TensorFlow sees, in all: one model copy each.
        hosts: machines that feed them.
        hbm_bytes: memory of one replica.
    """

    name: str
    chips: int
    replicas: int
    hosts: int
    hbm_bytes: int


def tpu_type(name: str) -> TpuType:
    """The type of that name.

    Raises:
        AcceleratorError: there is none; names those that are near.
    """
    wanted = name.strip().lower()
    if wanted in TPU_TYPES:
        return TPU_TYPES[wanted]
    family = wanted.partition("-")[0]
    alike = [known for known in TPU_TYPES if known.partition("-")[0] == family]
    near = alike or get_close_matches(wanted, TPU_TYPES, n=_SHOWN, cutoff=0.4) or ["v5litepod-8", "v6e-8"]
    raise AcceleratorError(f"--for {name}: no TPU type of that name is known; try {', '.join(near[:_SHOWN])}")


def _types() -> Iterator[TpuType]:
    # Family, sizes in the name, cores a chip in the name, replicas a chip, gigabytes a chip.
    families = (
        ("v2", (8, 32, 128, 256, 512), 2, 2, 16),
        ("v3", (8, 32, 64, 128, 256, 512, 1024, 2048), 2, 2, 32),
        ("v4", (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), 2, 1, 32),
        ("v5litepod", (1, 4, 8, 16, 32, 64, 128, 256), 1, 1, 16),
        ("v5p", (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), 2, 1, 95),
        ("v6e", (1, 4, 8, 16, 32, 64, 128, 256), 1, 1, 32),
    )
    for family, sizes, cores, replicas, gigabytes in families:
        for size in sizes:
            chips = size // cores
            # Only v5e and v6e come with eight chips on one machine.
            one_host = chips <= _CHIPS_OF_A_HOST or (cores == 1 and chips == 2 * _CHIPS_OF_A_HOST)
            yield TpuType(
                name=f"{family}-{size}",
                chips=chips,
                replicas=chips * replicas,
                hosts=1 if one_host else chips // _CHIPS_OF_A_HOST,
                hbm_bytes=gigabytes * _GB // replicas,
            )


TPU_TYPES = {each.name: each for each in _types()}
