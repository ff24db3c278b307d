"""Puts the lines of several engines beside each other and judges ours by Mooncake's TCP.

usage: table.py CSV...   (lines as engine.py and the `transfer` bench write them)
"""

import csv
import sys

# p50 of Mooncake's TCP over that of our TCP at least, by (pages, page bytes); CPU over ours at all.
FASTER = {(1, 16 << 10): 2.0, (24, 16 << 10): 2.0, (24, 64 << 10): 1.5, (24, 1 << 20): 1.0}
CPU_LESS = 2.0
FLOORS = {"memcpy", "writev/readv"}
OURS = {"shm", "tcp"}


def read(paths):
    lines = {}
    for path in paths:
        with open(path, newline="") as file:
            for line in csv.DictReader(file, fieldnames=FIELDS):
                if line["engine"] == "engine" or line["checksums"] == "sampled":
                    continue
                size = (int(line["pages"]), int(line["page_bytes"]))
                numbers = {name: float(line[name]) for name in FIELDS[4:]}
                lines.setdefault(size, {})[line["engine"], line["checksums"]] = numbers
    return lines


FIELDS = ["engine", "checksums", "page_bytes", "pages", "p50_us", "p99_us", "gbps", "cpu_s_per_gib"]


def label(engine, checksums):
    if engine in FLOORS:
        return f"floor: {engine}"
    return f"kvserve {engine}, sums {checksums}" if engine in OURS else engine


def main():
    lines = read(sys.argv[1:])
    print(
        f"{'pages':<15}{'what':<28}{'p50 us':>10}{'p99 us':>11}{'GB/s':>7}"
        f"{'CPU s/GiB':>11}{'p50':>8}{'CPU':>8}"
    )
    verdicts = []
    for size in sorted(lines, key=lambda size: size[0] * size[1]):
        pages, page_bytes = size
        of_size = lines[size]
        ours = of_size.get(("tcp", "off"))
        for (engine, checksums), found in of_size.items():
            times = cpu = ""
            if ours and engine not in OURS | FLOORS:
                times = f"{found['p50_us'] / ours['p50_us']:.2f}x"
                cpu = f"{found['cpu_s_per_gib'] / ours['cpu_s_per_gib']:.2f}x"
            print(
                f"{f'{pages} x {page_bytes >> 10} KiB':<15}{label(engine, checksums):<28}"
                f"{found['p50_us']:>10.1f}{found['p99_us']:>11.1f}{found['gbps']:>7.2f}"
                f"{found['cpu_s_per_gib']:>11.3f}{times:>8}{cpu:>8}"
            )
        peer = of_size.get(("mooncake-tcp", "off"))
        if ours and peer and size in FASTER:
            for what, key, least in [
                ("faster", "p50_us", FASTER[size]),
                ("less CPU", "cpu_s_per_gib", CPU_LESS),
            ]:
                ratio = peer[key] / ours[key]
                verdicts.append(
                    f"{pages} x {page_bytes >> 10} KiB: {ratio:.2f}x {what} "
                    f"(goal {least:g}x): {'met' if ratio >= least else 'MISSED'}"
                )
    print("\np50, CPU: of the engine over those of kvserve's TCP without checksums.")
    print("kvserve's TCP beside Mooncake's:")
    for verdict in verdicts:
        print(f"  {verdict}")


if __name__ == "__main__":
    main()
