"""Preconditions, generations and races, which commits rely on."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.gcs.raw import Raw
from tests.fakes.gcs.server import FakeGcs

RACERS, ROUNDS = 16, 20


def slow_clock() -> float:
    """A clock that sleeps. The store reads it between a check and its change, so a missing lock would show."""
    time.sleep(0.001)
    return time.time()


def test_one_of_sixteen_racing_inserts_wins() -> None:
    with FakeGcs(clock=slow_clock) as server:
        race_on(server)


def race_on(server: FakeGcs) -> None:
    barrier = threading.Barrier(RACERS)

    def race(racer: int) -> list[int]:
        statuses = []
        with Raw(server.url) as client:
            for number in range(ROUNDS):
                barrier.wait()
                name, data = f"round-{number}", f"{racer}".encode() * 1000
                if racer % 3 == 0:
                    statuses.append(client.insert(name, data, ifGenerationMatch=0).status)
                elif racer % 3 == 1:
                    statuses.append(client.insert_multipart(name, data, ifGenerationMatch=0).status)
                else:
                    path = "/upload/storage/v1/b/bucket/o?uploadType=resumable"
                    start = client.request("POST", path, {"name": name}, ifGenerationMatch=0)
                    session = start.headers["Location"]
                    end = client.chunk(session, f"0-{len(data) - 1}/{len(data)}", data) if session else start
                    statuses.append(end.status)
        return statuses

    with ThreadPoolExecutor(RACERS) as pool:
        results = list(pool.map(race, range(RACERS)))
    for number in range(ROUNDS):
        statuses = sorted(result[number] for result in results)
        assert statuses == [200] + [412] * (RACERS - 1)
        winner = next(racer for racer, result in enumerate(results) if result[number] == 200)
        assert server.store.bytes("bucket", f"round-{number}") == f"{winner}".encode() * 1000


@pytest.mark.parametrize(
    ("query", "absent", "present"),
    [
        ({"ifGenerationMatch": "0"}, 200, 412),
        ({"ifGenerationMatch": "GENERATION"}, 412, 200),
        ({"ifGenerationMatch": "5"}, 412, 412),
        ({"ifGenerationNotMatch": "0"}, 501, 501),  # Baton sends none, so the fake has none
        ({"ifMetagenerationMatch": "1"}, 501, 501),
    ],
    ids=str,
)
def test_writes_check_preconditions(
    raw: Raw, server: FakeGcs, query: dict[str, str], absent: int, present: int
) -> None:
    generation = str(server.store.put("bucket", "present", b"old").generation)
    query = {key: value.replace("GENERATION", generation) for key, value in query.items()}
    assert raw.insert("absent", b"new", **query).status == absent
    assert raw.delete("present", **query).status == {200: 204}.get(present, present)


def test_missing_names_get_the_services_messages(raw: Raw) -> None:
    assert raw.get("a/b").message == "No such object: bucket/a/b"
    assert raw.delete("a/b").status == 404
    assert raw.get("n", bucket="none").message == "The specified bucket does not exist."
    assert raw.insert("n", b"", bucket="none").status == 404
    refused = (raw.insert("n", b""), raw.insert("n", b"", ifGenerationMatch=0))[1].json()["error"]
    assert refused["message"] == "At least one of the pre-conditions you specified did not hold."
    assert refused["errors"][0]["reason"] == "conditionNotMet"
    assert raw.request("GET", "/storage/v1/nonsense").status == 404


def test_generations_rise_while_the_clock_stands_still() -> None:
    with FakeGcs(clock=lambda: 1000.0) as server:
        generations = [server.store.put("bucket", "n", b"").generation for _ in range(5)]
    assert generations == sorted(set(generations))
