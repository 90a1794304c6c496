"""`baton hosts`: prints the hosts of a run as this host sees them."""

import json
import os

from flows.commands.options import AsJson
from flows.commands.output import say, say_json
from tasks.foundation.machine.cluster import cluster_of


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
