"""The report of `bench kernels` for people, and as JSON."""

from __future__ import annotations

import json
from typing import Any

from bench.kernels_cases import OURS


def text(report: dict[str, Any]) -> str:
    """Tables by family and peers, and a last line with the geometric means."""
    facts = report["machine"]
    lines = [
        f"{facts.get('processor', facts['architecture'])}, {facts['cores']} usable cores, "
        f"{' '.join(facts.get('flags', []))}",
        "limits: " + (", ".join(f"{k} {v:.0f}" for k, v in report["limits"].items()) or "unknown"),
        f"Medians of {report['rounds']} rounds and their spread; a ratio is the peer's time over "
        "ours. Our steps run in",
        "programs of up to 16, each waiting for the one before; starting a program, "
        f"{report['start_us']:.0f} us, is counted.",
    ]
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in report["cases"]:
        tables.setdefault((record["family"], *record["ratios"]), []).append(record)
    for (family, *peers), records in tables.items():
        lines += ["", *_table(family, peers, records)]
    lines += ["", *(f"{name}: skipped, {why}" for name, why in report["skipped"].items())]
    means = [
        f"{family} {', '.join(f'{peer} {value:.2f}' for peer, value in peers.items())}"
        for family, peers in report["geometric_means"].items()
    ]
    lines.append("geometric means of the ratios: " + ("; ".join(means) or "no peers measured"))
    return "\n".join(lines)


def _table(family: str, peers: list[str], records: list[dict[str, Any]]) -> list[str]:
    """Cases of a family beside the same peers, then what was left out, and what agreement means."""
    compared = [title for peer in peers for title in (peer, "ratio")]
    rows = [[family, OURS, *compared, "of the limit", "error"]]
    notes = []
    for record in records:
        name = record["case"].partition("/")[2]
        for side, why in record["skipped"].items():
            kind = "WRONG" if side in record["wrong"] else "skipped"
            notes.append(f"  {name}, {side}: {kind}, {why}")
        if record["sides"]:
            rows.append(_row(name, record))
    meanings = {(r["tolerance"], r["reason"]) for r in records if r["sides"]}
    notes += [f"  agreement within {value:g}: {why}" for value, why in sorted(meanings)]
    return [*(_aligned(rows) if len(rows) > 1 else [family]), *notes]


def _row(name: str, record: dict[str, Any]) -> list[str]:
    sides = record["sides"]
    cells = [f"  {name}", _time(sides[OURS]["us"])]
    for peer, ratio in record["ratios"].items():
        cells += [_time(sides[peer]["us"]), _ratio(ratio)]
    limit = f"{record['of_limit']:.0%} {record['limit']}" if "limit" in record else "unknown"
    return [*cells, limit, f"{sides[OURS]['error']:.1g}"]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["   ".join(cell.ljust(n) for cell, n in zip(row, widths)).rstrip() for row in rows]


def _time(us: dict[str, float]) -> str:
    units = ((1, "us"), (1e3, "ms"), (1e6, "s"))
    scale, unit = next((u for u in units if us["median"] < 1000 * u[0]), units[-1])
    spread = (us["high"] - us["low"]) / us["median"]
    return f"{us['median'] / scale:6.4g} {unit} ±{spread / 2:.0%}"


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} … {ratio['high']:.2f})"


def to_json(report: dict[str, Any]) -> str:
    """The report as one line of JSON."""
    return json.dumps(report)
