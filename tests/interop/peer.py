"""The C++ engine as one end of an interop test, through its own Python module.

    peer.py target    --metadata URL --name NAME --protocol tcp|rdma [--device LIST] --size BYTES
                      [--expect-bytes N]
    peer.py initiator --metadata URL --name NAME --protocol tcp|rdma [--device LIST] --segment PEER
                      --bytes BYTES --block BYTES [--seed N] [--seconds S]

The target prints `ready SEGMENT` and runs until SIGTERM; its status then is 0 if the first N bytes
of its memory are what `rerail bench initiator` writes in its first round. The initiator writes a random pattern to
the peer's first buffer, reads it back into other memory, compares every byte, and prints one JSON
object. With --seconds it writes one block after the other for that long, and prints how many failed
and the longest time between two that ended. Its own logging goes to stderr.
"""

import argparse
import ctypes
import json
import mmap
import os
import random
import signal
import sys
import time

WORD = (1 << 64) - 1


def fail(message):
    print(f"peer.py: {message}", file=sys.stderr)
    sys.exit(1)


class Buffer:
    """Page-aligned memory at a fixed address, registered with the engine."""

    def __init__(self, engine, size):
        self.map = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.size = size
        if engine.register_memory(self.address, size) != 0:
            fail(f"cannot register {size} bytes")


def start(arguments):
    # Without it the engine takes RDMA wherever it finds a device, whatever protocol it is asked for.
    if arguments.protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    status = engine.initialize(
        arguments.name, arguments.metadata, arguments.protocol, arguments.device
    )
    if status != 0:
        fail(f"the C++ engine does not start: {status}")
    return engine


def target(arguments):
    engine = start(arguments)
    buffer = Buffer(engine, arguments.size)
    segment = arguments.name
    if arguments.metadata == "P2PHANDSHAKE":
        segment = f"127.0.0.1:{engine.get_rpc_port()}"
    signal.signal(signal.SIGTERM, lambda *_: os._exit(wrong_words(buffer, arguments.expect_bytes) != 0))
    print(f"ready {segment}", flush=True)
    while True:
        signal.pause()


def wrong_words(buffer, count):
    """Words of the first `count` bytes that are not of the bench's pattern: seed 1, round 0."""
    tail = rotated(mixed(0), 17) ^ 1
    wrong = 0
    for offset in range(0, count - count % 8, 8):
        expected = mixed(tail ^ mixed((buffer.address + offset) // 8))
        wrong += buffer.map[offset : offset + 8] != expected.to_bytes(8, "little")
    if wrong:
        print(f"peer.py: {wrong} words are not what was written", file=sys.stderr, flush=True)
    return wrong


def mixed(value):
    """The finaliser of SplitMix64, as in the bench's pattern."""
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def rotated(value, bits):
    return ((value << bits) | (value >> (64 - bits))) & WORD


def initiator(arguments):
    engine = start(arguments)
    source = Buffer(engine, arguments.bytes)
    back = Buffer(engine, arguments.bytes)
    pattern = random.Random(arguments.seed).randbytes(arguments.bytes)
    source.map[:] = pattern
    remote = engine.get_first_buffer_address(arguments.segment)
    if arguments.seconds:
        steady(arguments, engine, source, remote)
    failed = 0
    for operation, buffer in (
        (engine.transfer_sync_write, source),
        (engine.transfer_sync_read, back),
    ):
        for offset in range(0, arguments.bytes, arguments.block):
            length = min(arguments.block, arguments.bytes - offset)
            status = operation(
                arguments.segment, buffer.address + offset, remote + offset, length
            )
            failed += status != 0
    wrong = sum(
        1
        for at in range(0, arguments.bytes, 4096)
        if back.map[at : at + 4096] != pattern[at : at + 4096]
    )
    print(json.dumps({"bytes": arguments.bytes, "failed": failed, "wrong_pages": wrong}), flush=True)
    # The engine's own threads do not end by themselves.
    os._exit(0 if failed == 0 and wrong == 0 else 1)


def steady(arguments, engine, source, remote):
    begin = last = time.monotonic()
    ended, failed, stall = 0, 0, 0.0
    blocks = max(1, arguments.bytes // arguments.block)
    print("moving", flush=True)
    while last - begin < arguments.seconds:
        offset = (ended % blocks) * arguments.block
        status = engine.transfer_sync_write(
            arguments.segment, source.address + offset, remote + offset, arguments.block
        )
        now = time.monotonic()
        stall = max(stall, now - last)
        last = now
        ended += 1
        failed += status != 0
    report = {"ops": ended, "failed": failed, "max_stall_ms": stall * 1000.0}
    print(json.dumps(report), flush=True)
    os._exit(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["target", "initiator"])
    parser.add_argument("--metadata", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--protocol", required=True, choices=["tcp", "rdma"])
    parser.add_argument("--device", default="")
    parser.add_argument("--size", type=int, default=64 << 20)
    parser.add_argument("--expect-bytes", type=int, default=0)
    parser.add_argument("--segment", default="")
    parser.add_argument("--bytes", type=int, default=16 << 20)
    parser.add_argument("--block", type=int, default=65536)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    (target if arguments.role == "target" else initiator)(arguments)


main()
