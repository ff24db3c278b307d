"""Times one public transfer engine between two processes on this host.

usage: engine.py ENGINE CORES MILLISECONDS SIZES
  ENGINE        one of the names in ENGINES below
  CORES         "0,1": CPU of the reading and of the serving process, or "none"
  MILLISECONDS  measured time at each size
  SIZES         "1x16,24x64": pages x KiB

The reading process starts the serving one, both with the same pinning as kvserve's own bench. One
pull at a time; pages lie scattered on both sides, others each time; what arrives is compared with
what is known to lie there. CPU seconds are those of both processes with all their threads.
Prints one line a size: engine,checksums,page_bytes,pages,p50_us,p99_us,gbps,cpu_s_per_gib
"""

import json
import mmap
import os
import random
import subprocess
import sys
import time

POOL_BYTES = 128 << 20
MULTIPLIER = 0x9E3779B97F4A7C15
WARM_UP = 5

# UCX chooses among the transports it is allowed.
UCX = {"nixl-tcp": "tcp,self", "nixl-shm": "posix,sysv,cma,self,tcp"}


class Mooncake:
    """Mooncake's transfer engine over TCP, peer to peer."""

    def __init__(self, base, length):
        from mooncake.engine import TransferEngine

        self.base = base
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("mooncake does not start")
        if self.engine.register_memory(base, length) != 0:
            raise RuntimeError("mooncake registers no memory")

    def card(self):
        return {"host": f"127.0.0.1:{self.engine.get_rpc_port()}", "base": self.base}

    def meet(self, card):
        self.peer = card

    def plan(self, page_bytes):
        self.page_bytes = page_bytes

    def pull(self, sources, targets):
        size = self.page_bytes
        here = [self.base + page * size for page in targets]
        there = [self.peer["base"] + page * size for page in sources]
        done = self.engine.batch_transfer_sync_read(
            self.peer["host"], here, there, [size] * len(here)
        )
        if done != 0:
            raise RuntimeError(f"mooncake: {done}")


class Nixl:
    """NIXL with its UCX backend; descriptors are prepared once a size, as a server would."""

    def __init__(self, base, length):
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.base = base
        self.agent = nixl_agent(f"kv{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(base, length, 0, "")], mem_type="DRAM")

    def card(self):
        return {"agent": self.agent.get_agent_metadata().hex(), "base": self.base}

    def meet(self, card):
        name = self.agent.add_remote_agent(bytes.fromhex(card["agent"]))
        self.name = name.decode() if isinstance(name, bytes) else name
        self.peer = card["base"]

    def plan(self, page_bytes):
        def pages(base):
            count = POOL_BYTES // page_bytes
            places = [(base + at * page_bytes, page_bytes, 0) for at in range(count)]
            return self.agent.get_xfer_descs(places, mem_type="DRAM")

        self.here = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages(self.base))
        self.there = self.agent.prep_xfer_dlist(self.name, pages(self.peer))

    def pull(self, sources, targets):
        agent = self.agent
        work = agent.make_prepped_xfer("READ", self.here, targets, self.there, sources)
        state = agent.transfer(work)
        while state == "PROC":
            state = agent.check_xfer_state(work)
        if state != "DONE":
            raise RuntimeError(f"nixl: {state}")
        agent.release_xfer_handle(work)


class Dlslime:
    """DLSlime's TCP endpoint."""

    def __init__(self, base, length):
        from dlslime import TcpEndpoint

        self.endpoint = TcpEndpoint("127.0.0.1", 0)
        self.here = self.endpoint.register_memory_region("kv", base, 0, length)

    def card(self):
        return {"endpoint": self.endpoint.endpoint_info(), "regions": self.endpoint.mr_info()}

    def meet(self, card):
        self.endpoint.connect(card["endpoint"])
        regions = card["regions"]
        region = regions.get("kv", regions)
        self.there = self.endpoint.register_remote_memory_region("kv", region)

    def plan(self, page_bytes):
        self.page_bytes = page_bytes

    def pull(self, sources, targets):
        size = self.page_bytes
        # The serving side's offset comes first.
        reads = [
            (self.here, self.there, source * size, target * size, size)
            for source, target in zip(sources, targets)
        ]
        done = self.endpoint.read(reads, None, 30_000).wait()
        if done not in (0, None, True):
            raise RuntimeError(f"dlslime: {done}")


ENGINES = {
    "mooncake-tcp": Mooncake,
    "nixl-tcp": Nixl,
    "nixl-shm": Nixl,
    "dlslime-tcp": Dlslime,
}


def pool():
    """Anonymous memory, every page touched; the words of the serving side are known."""
    import numpy

    memory = mmap.mmap(-1, POOL_BYTES)
    words = numpy.frombuffer(memory, dtype=numpy.uint64)
    return memory, words


def known(first_word, count):
    import numpy

    at = numpy.arange(first_word, first_word + count, dtype=numpy.uint64)
    return at * numpy.uint64(MULTIPLIER)


def pin(cores, which):
    if cores != "none":
        os.sched_setaffinity(0, {int(cores.split(",")[which])})


def settle(engine):
    """What the engines read from the environment."""
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if engine in UCX:
        os.environ["UCX_TLS"] = UCX[engine]
        if engine == "nixl-tcp":
            os.environ["UCX_NET_DEVICES"] = "lo"


def serve(engine, cores):
    """The prefill side: fills its pool, tells its card, does nothing more by itself."""
    pin(cores, 1)
    settle(engine)
    memory, words = pool()
    words[:] = known(0, words.size)
    side = ENGINES[engine](words.ctypes.data, words.nbytes)
    answers = os.fdopen(int(os.environ["CARDS_FD"]), "w")
    print(json.dumps(side.card()), file=answers, flush=True)
    card = json.loads(sys.stdin.readline())
    if engine.startswith("dlslime"):
        side.meet(card)
    print("met", file=answers, flush=True)
    sys.stdin.read()  # until the reading side ends
    os._exit(0)


def cpu_clock(process):
    """The number of the clock that counts a process's CPU time."""
    return (~process << 3) | 2


def measure(engine, cores, seconds, sizes):
    pin(cores, 0)
    settle(engine)
    memory, words = pool()
    words[:] = 1
    side = ENGINES[engine](words.ctypes.data, words.nbytes)
    here, there = os.pipe()
    child = subprocess.Popen(
        [sys.executable, __file__, engine, cores, "serve"],
        stdin=subprocess.PIPE,
        pass_fds=[there],
        env={**os.environ, "CARDS_FD": str(there)},
        text=True,
    )
    os.close(there)
    answers = os.fdopen(here)
    try:
        card = json.loads(answers.readline())
        child.stdin.write(json.dumps(side.card()) + "\n")
        child.stdin.flush()
        side.meet(card)
        if answers.readline() != "met\n":
            raise RuntimeError("the serving side is gone")
        clocks = [cpu_clock(os.getpid()), cpu_clock(child.pid)]
        for pages, page_bytes in sizes:
            side.plan(page_bytes)
            line = at_size(side, words, clocks, seconds, pages, page_bytes)
            print(f"{engine},off,{page_bytes},{pages},{line}", flush=True)
    finally:
        child.kill()
        child.wait()
    os._exit(0)  # engines' threads do not all end by themselves


def at_size(side, words, clocks, seconds, pages, page_bytes):
    slots = POOL_BYTES // page_bytes
    pick = random.Random(pages * page_bytes)

    def somewhere():
        return pick.sample(range(slots), pages), pick.sample(range(slots), pages)

    def compare(sources, targets):
        count = page_bytes // 8
        for source, target in list(zip(sources, targets))[:4]:
            found = words[target * count : (target + 1) * count]
            if not (found == known(source * count, count)).all():
                raise RuntimeError("other bytes than were sent")

    for _ in range(WARM_UP):
        sources, targets = somewhere()
        side.pull(sources, targets)
        compare(sources, targets)
    taken, spent = [], 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken) < 10:
        sources, targets = somewhere()
        cpu = sum(time.clock_gettime(clock) for clock in clocks)
        began = time.perf_counter_ns()
        side.pull(sources, targets)
        taken.append((time.perf_counter_ns() - began) / 1000)
        spent += sum(time.clock_gettime(clock) for clock in clocks) - cpu
    compare(sources, targets)
    taken.sort()
    p50, p99 = (taken[int((len(taken) - 1) * of)] for of in (0.5, 0.99))
    pulled = len(taken) * pages * page_bytes
    rate = pages * page_bytes / p50 / 1000
    return f"{p50:.2f},{p99:.2f},{rate:.3f},{spent / (pulled / 2**30):.4f}"


def sizes_of(text):
    pairs = (word.split("x") for word in text.split(","))
    return [(int(pages), int(kib) << 10) for pages, kib in pairs]


if __name__ == "__main__":
    name, where, rest = sys.argv[1], sys.argv[2], sys.argv[3:]
    if rest == ["serve"]:
        serve(name, where)
    else:
        measure(name, where, int(rest[0]) / 1000, sizes_of(rest[1]))
