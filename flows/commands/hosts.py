"""`baton hosts` prints the hosts of a run as this host sees them; `baton slice-server` serves a host of a TPU slice."""

import json
import os
from typing import Annotated

import typer

from baton.flows.commands.options import AsJson
from baton.flows.commands.output import say, say_json
from baton.tasks.foundation.contracts.placement import SERVER_PORT
from baton.tasks.foundation.machine.cluster import cluster_of
from baton.tasks.foundation.machine.tpu import serve


def hosts(*, as_json: AsJson = False) -> None:
    """Print the TF_CONFIG of this host, as baton run reads it here.

    Without TF_CONFIG in the environment, it is made of what Slurm, JobSet, SkyPilot or Vertex AI sets.
    """
    cluster = cluster_of(os.environ)
    if as_json:
        found = {"source": cluster.source, "host": cluster.host, "addresses": cluster.addresses}
        say_json({**found, "tf_config": cluster.tf_config()})
        return
    say(f"host {cluster.host} of {len(cluster.addresses)}, from {cluster.source}", aside=True)
    say(json.dumps(cluster.tf_config()))


def slice_server(
    *, port: Annotated[int, typer.Option(min=1, max=65535, help="listen here, on all interfaces")] = SERVER_PORT
) -> None:
    """Run the TensorFlow server of one host of a TPU slice, until it is ended.

    A run with accelerator.tpu: slice, or with its address, trains on it. Any client that reaches the port can use it:
    keep it within the network of the slice. Where Google's server runs, as on some TPU VMs, none is needed.
    """
    serve(port, lambda: say(f"this host's TPU is served at port {port}"))
