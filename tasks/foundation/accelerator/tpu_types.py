"""Google Cloud's TPU types, by name.

Sizes and memory are from Google's documentation (cloud.google.com/tpu/docs: "System architecture", "v2" to "v6e", as of
2025). Names count TensorCores for v2, v3, v4 and v5p, which have two per chip, and chips for v5e (`v5litepod-…`) and
v6e. TensorFlow has one replica per core on v2 and v3, and one per chip on the others. Gigabytes are decimal, because
the runtime reserves some of the memory.
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
    """The size of one TPU of this type.

    Attributes:
        name: as in `gcloud compute tpus tpu-vm create --accelerator-type`.
        chips: number of chips.
        replicas: number of TensorFlow devices, with one model copy each.
        hosts: number of machines.
        hbm_bytes: memory of one replica.
    """

    name: str
    chips: int
    replicas: int
    hosts: int
    hbm_bytes: int


def tpu_type(name: str) -> TpuType:
    """The type with this name.

    Raises:
        AcceleratorError: the name is unknown; the message suggests similar ones.
    """
    wanted = name.strip().lower()
    if wanted in TPU_TYPES:
        return TPU_TYPES[wanted]
    family = wanted.partition("-")[0]
    similar = [known for known in TPU_TYPES if known.partition("-")[0] == family]
    near = similar or get_close_matches(wanted, TPU_TYPES, n=_SHOWN, cutoff=0.4) or ["v5litepod-8", "v6e-8"]
    raise AcceleratorError(f"--for {name}: unknown TPU type; try {', '.join(near[:_SHOWN])}")


def _types() -> Iterator[TpuType]:
    # Family, sizes in the name, cores per chip in the name, replicas per chip, gigabytes per chip.
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
            # Only v5e and v6e have eight chips on one machine.
            one_host = chips <= _CHIPS_OF_A_HOST or (cores == 1 and chips == 2 * _CHIPS_OF_A_HOST)
            yield TpuType(
                name=f"{family}-{size}",
                chips=chips,
                replicas=chips * replicas,
                hosts=1 if one_host else chips // _CHIPS_OF_A_HOST,
                hbm_bytes=gigabytes * _GB // replicas,
            )


TPU_TYPES = {each.name: each for each in _types()}
