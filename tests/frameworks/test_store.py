"""The store of jobs whose framework has none, over real sockets and between real processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dpro.adapter import RankLeft
from dpro_integrations import store
from dpro_integrations.exchange import StoreExchange
from dpro_integrations.store import MOST_FRAME_BYTES, Client, Server
from tests.frameworks.launch import ROOT, clean_environment

#: Far longer than any answer takes: what hangs shows as a TimeoutError.
PATIENT_S = 20.0
Peer = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("127.0.0.1")
    yield made
    made.close()


_joined: list[Client] = []


def join(server: Server) -> Client:
    """A client that is closed with the test."""
    _joined.append(Client(server.host, server.port, server.secret, PATIENT_S))
    return _joined[-1]


@pytest.fixture(autouse=True)
def clients() -> Iterator[None]:
    yield
    while _joined:
        _joined.pop().close()


@pytest.fixture
def client(server: Server) -> Client:
    return join(server)


@pytest.fixture
def peer() -> Iterator[Peer]:
    """Starts a role of ``store_peer``; all end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(role: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.frameworks.store_peer", role, *map(str, arguments)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


# -- what it does --------------------------------------------------------------------------------


def test_operations(client: Client) -> None:
    """As ``torch.distributed.Store`` documents them."""
    assert not client.check(["a"])
    client.set("a", b"\x00\xff")
    client.set("b", "text ü")
    assert client.check(["a", "b"]) and not client.check(["a", "c"])
    assert client.get("a") == b"\x00\xff" and client.get("b") == "text ü".encode()
    client.set("a", b"")
    assert client.check(["a"]) and client.get("a") == b""
    assert client.compare_set("new", "", "first") == b"first"
    assert client.compare_set("new", "", "second") == b"first"
    assert client.compare_set("new", "first", "third") == b"third"
    assert client.compare_set("none", "expected", "value") == b"expected" and not client.check(["none"])
    assert client.delete_key("a") and not client.delete_key("a") and not client.check(["a"])
    with pytest.raises(LookupError, match="'a'"):
        client.get("a")
    assert client.get("b")  # the client still works


def test_what_is_written_is_read_by_others(server: Server, client: Client) -> None:
    blob = random.Random(1).randbytes(4 << 20)
    client.set("blob", blob)
    assert join(server).get("blob") == blob


def test_two_proposals_race_and_all_ranks_get_the_same_one(server: Server, peer: Peer) -> None:
    ranks = [peer("propose", server.host, server.port, server.secret, f"rank{k}") for k in range(3)]
    assert [says(rank) for rank in ranks] == ["ready"] * 3
    for rank in ranks:
        go_on(rank)
    answers = [says(rank).split() for rank in ranks]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 200 and set(answers[0]) <= {"rank0", "rank1", "rank2"}


def test_it_is_heard_at_its_own_address_only() -> None:
    made = Server("127.0.0.2")
    try:
        join(made).set("a", "1")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", made.port), 5.0)
    finally:
        made.close()


def test_a_full_store_takes_no_more_until_there_is_room(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_BYTES", 3000)
    client.set("a", b"x" * 2000)
    for _ in range(2):  # the second time nothing is counted twice
        with pytest.raises(OSError, match="the store is full"):
            client.set("b", b"x" * 2000)
    client.set("a", b"y" * 2500)  # in the place of the former one
    client.delete_key("a")
    client.set("b", b"x" * 2000)
    assert client.get("b") == b"x" * 2000


# -- who dies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fork", ["alone", "fork"])
def test_a_server_that_was_killed(peer: Peer, fork: str) -> None:
    """Also where a child that it had forked lives on, and has all its files."""
    process = peer("serve", fork)
    host, port, secret, child = says(process).split()
    client = Client(host, int(port), secret, PATIENT_S)
    assert client.get("of rank 0") == b"here"
    process.kill()
    process.wait()
    try:
        for _ in range(2):
            with pytest.raises(ConnectionError, match="the store is gone"):
                client.set("a", "1")
        with pytest.raises(ConnectionRefusedError):
            Client(host, int(port), secret, PATIENT_S)
    finally:
        if fork == "fork":
            os.kill(int(child), signal.SIGKILL)


def test_a_server_that_does_not_answer(peer: Peer) -> None:
    process = peer("serve", "alone")
    host, port, secret, _ = says(process).split()
    client = Client(host, int(port), secret, PATIENT_S)
    client._timeout_s = 0.3
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.3 s"):
        client.get("of rank 0")
    process.send_signal(signal.SIGCONT)
    with pytest.raises(ConnectionError):  # a late answer is not taken for the next one
        client.get("of rank 0")


def test_a_client_that_was_killed_in_the_midst_of_a_request(server: Server, client: Client, peer: Peer) -> None:
    process = peer("half", server.host, server.port, server.secret)
    assert says(process) == "ready"
    process.kill()
    process.wait()
    assert client.get("whole") == b"1"
    client.set("a", "1")
    assert not client.check(["half"])
    assert join(server).get("a") == b"1"


def test_a_forked_child_does_not_use_its_parents_socket(server: Server, client: Client, peer: Peer) -> None:
    assert says(peer("forked", server.host, server.port, server.secret)) == "a forked child is no rank"
    assert client.check(["by the parent"]) and not client.check(["by the child"])


# -- who is not of the job ---------------------------------------------------------------------------


def hung_up(connection: socket.socket) -> bool:
    """Whether the server closes, whatever it had said before."""
    connection.settimeout(PATIENT_S)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_wrong_secret(server: Server, client: Client) -> None:
    with pytest.raises(ConnectionError):
        Client(server.host, server.port, "0" * len(server.secret), PATIENT_S)
    client.set("a", "1")  # it goes on


def test_a_server_that_does_not_know_the_secret() -> None:
    """Someone else listens where the store was: nothing is told to it."""

    def pretend() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(store._MAGIC + bytes(store._NONCE_BYTES))
            got.append(connection.recv(4096))
            connection.sendall(bytes(store._DIGEST_BYTES))
            got.append(connection.recv(4096))

    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionError, match="does not know the secret"):
            Client("127.0.0.1", listening.getsockname()[1], "the secret", PATIENT_S)
        thread.join(PATIENT_S)
    assert b"the secret" not in got[0] and got[1] == b""


@pytest.mark.parametrize(
    "said",
    [
        b"GET /dpro/1 HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
        store._frame([b"set", b"a", b"by a stranger"]) + bytes(100),
        random.Random(2).randbytes(5000),
    ],
    ids=["http", "a request without a handshake", "noise"],
)
def test_strangers(server: Server, client: Client, said: bytes) -> None:
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(said)
        assert hung_up(connection)
    assert not client.check(["a"])
    client.set("a", "1")
    assert join(server).get("a") == b"1"


def test_strangers_that_say_nothing_keep_nobody_out(server: Server) -> None:
    held = [socket.create_connection((server.host, server.port)) for _ in range(store._STRANGERS // 2)]
    try:
        join(server).set("a", "1")
    finally:
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    "said",
    [
        struct.pack(">I", MOST_FRAME_BYTES + 1),
        struct.pack(">I", 0xFFFFFFFF) + bytes(1000),
        struct.pack(">I", 0),
        struct.pack(">II", 4, 5),
        struct.pack(">I", 3) + b"abc",
        store._frame([b"remove_all"]),
        store._frame([b"set", b"a"]),
        store._frame([b"set", b"\xff\xfe", b"1"]),
        random.Random(3).randbytes(5000),
    ],
    ids=[
        "oversized",
        "far too large",
        "empty",
        "a field that is cut",
        "no field",
        "unknown",
        "too few",
        "no text",
        "noise",
    ],
)
def test_nonsense_from_within_costs_its_own_connection_only(server: Server, client: Client, said: bytes) -> None:
    other = join(server)
    other._socket.sendall(said)
    assert hung_up(other._socket)
    with pytest.raises(ConnectionError):
        other.set("a", "1")
    client.set("a", "1")
    assert client.get("a") == b"1"


def test_a_value_that_is_too_large_is_not_sent(client: Client) -> None:
    with pytest.raises(ValueError, match="more than the store takes at once"):
        client.set("a", bytes(MOST_FRAME_BYTES))
    assert not client.check(["a"])


# -- the exchange on it ------------------------------------------------------------------------------


@pytest.fixture
def exchanges(server: Server) -> list[StoreExchange]:
    return [StoreExchange(join(server), rank, 2, "tag") for rank in range(2)]


def test_ranks_agree(exchanges: list[StoreExchange]) -> None:
    """Blobs longer than one frame, then one decision for all."""
    blobs = [random.Random(rank).randbytes(size) for rank, size in enumerate((9 << 20, 3))]

    def meet(exchange: StoreExchange) -> tuple[list[bytes], str]:
        exchange.post("0/plan", blobs[exchange.rank])
        if exchange.rank:
            return [], exchange.agree("0/plan", exchange.wait("0/plan", PATIENT_S))
        return exchange.collect("0/plan", PATIENT_S), exchange.agree("0/plan", "decided")

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, exchanges)
    assert first == (blobs, "decided") and second == ([], "decided")


def test_a_rank_that_left_and_one_that_is_late(exchanges: list[StoreExchange]) -> None:
    exchanges[0].post("0/x", b"")
    with pytest.raises(TimeoutError, match=r"rank 1 did not answer within 0\.1 s"):
        exchanges[0].collect("0/x", 0.1)
    exchanges[1].post("1/x", b"before it left")
    exchanges[1].leave()
    exchanges[0].post("1/x", b"")
    assert exchanges[0].collect("1/x", PATIENT_S) == [b"", b"before it left"]
    exchanges[0].post("2/x", b"")
    with pytest.raises(RankLeft, match="rank 1 left"):
        exchanges[0].collect("2/x", PATIENT_S)


def test_tuners_of_one_job_do_not_hear_each_other(server: Server) -> None:
    one, other = (StoreExchange(join(server), 0, 1, tag) for tag in ("1", "2"))
    assert one.agree("0/x", "one") == "one"
    assert other.agree("0/x", "other") == "other"


def test_nothing_of_a_framework_is_imported() -> None:
    code = (
        "import sys, dpro_integrations.horovod_exchange\n"
        "print([n for n in ('torch', 'tensorflow', 'mxnet', 'horovod') if n in sys.modules])"
    )
    paths = os.pathsep.join([str(ROOT / "core"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path("/"),
        env=clean_environment(PYTHONPATH=paths),
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]", done.stderr
