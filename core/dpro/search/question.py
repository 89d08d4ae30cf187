"""One what-if question: what the words of ``dpro whatif`` mean, asked of one graph.

Knows words, the what-ifs of ``replay`` and the passes that answer some; not who asks, nor how many there are
(:mod:`dpro.search.sweep`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.passes.compression import Compression
from dpro.passes.mixed_precision import MixedPrecision, dtype_of, parse
from dpro.replay import whatif
from dpro.replay.whatif import WhatIfError
from dpro.report.patience import at_most

#: What a question may hold, by the names of the options; all of it together is one question.
KEYS = ("scale", "bandwidth", "workers", "precision", "compress")
#: A regular expression may take time exponential in a name's length; an honest one takes milliseconds.
PATTERN_SECONDS = 2.0


def ask(graph: Graph, question: Mapping[str, Any]) -> list[str]:
    """Edit ``graph`` as the question wants; returns what was assumed, a line each. ``graph.undo`` takes it back.

    Args:
        question: of :data:`KEYS`, less what is None: ``scale`` a list of ``REGEX=F``, ``bandwidth`` "2x", ``workers``
            8, ``precision`` "bf16=0.4", ``compress`` "bf16".

    Raises:
        WhatIfError: it cannot be asked, of this graph or at all.
    """
    said: list[str] = []
    network = network_of(graph)  # as captured, whatever the question changes first
    for item in question.get("scale") or []:
        pattern, factor = pattern_and_factor(item)
        with at_most(PATTERN_SECONDS, WhatIfError(f"pattern {pattern!r} takes too long to match")):
            said.append(whatif.scale_ops(graph, pattern, factor).assumption)
    if (precision := question.get("precision")) is not None:
        said.append(_precision(graph, precision, network))
    if (compress := question.get("compress")) is not None:
        said.append(_compress(graph, compress, network))
    if (bandwidth := question.get("bandwidth")) is not None:
        said.append(whatif.scale_bandwidth(graph, bandwidth, **network).assumption)
    if (workers := question.get("workers")) is not None:
        said.append(whatif.set_workers(graph, workers, latency_ns=network.get("latency_ns", 0.0)).assumption)
    if whatif.total_ns(graph) >= whatif.MAX_TOTAL_NS:
        raise WhatIfError("a step would last for years: ask for less")
    return said


def network_of(graph: Graph) -> dict[str, float]:
    """What one byte more costs, and the latency if the fit can tell it; empty if no size is known."""
    from dpro.cost.links import fit_all_reduce
    from dpro.cost.sync import fit

    told = fit_all_reduce(graph)  # messages tell the two apart even where all buckets have one size
    if told is not None and told.ns_per_byte > 0:
        return {"ns_per_byte": told.ns_per_byte, "latency_ns": told.latency_ns}
    known = whatif.transfers(graph)
    try:
        model = fit(*known)
    except ValueError:
        return {}
    if model.trust == "good" and model.ns_per_byte > 0:
        return {"ns_per_byte": model.ns_per_byte, "latency_ns": model.latency_ns}
    # Too few sizes, or too noisy, to tell latency from bandwidth: all of the time is taken for bandwidth.
    return {"ns_per_byte": float(known[1].sum() / known[0].sum())}


def pattern_and_factor(text: str) -> tuple[str, float]:
    """``gemm=0.5`` -> ("gemm", 0.5).

    Raises:
        WhatIfError: it is nothing of the kind.
    """
    pattern, separator, factor = text.rpartition("=")
    try:
        if separator and pattern:
            return pattern, float(factor)
    except ValueError:
        pass
    raise WhatIfError(f"{text!r} is not REGEX=FACTOR, such as 'gemm=0.5'")


def _precision(graph: Graph, text: str, network: Mapping[str, float]) -> str:
    edit = MixedPrecision()
    try:
        candidate = parse(text)
    except ValueError as error:
        raise WhatIfError(f"precision {error}") from error
    if not edit.legal(graph, candidate):
        raise WhatIfError(
            "no float32 gradients are known in buckets here: nothing to reduce in 16 bit"
            if candidate.gradients
            else "no matrix product or convolution is known by its name here: nothing to compute in 16 bit"
        )
    return _applied(graph, edit, candidate, network)


def _compress(graph: Graph, text: str, network: Mapping[str, float]) -> str:
    edit, dtype = Compression(), dtype_of(text)
    if dtype is None:
        raise WhatIfError(f"compress {text!r}: there is bf16 and fp16")
    if not edit.legal(graph, dtype):
        raise WhatIfError("no float32 gradients are known in buckets here: nothing to reduce in 16 bit")
    return _applied(graph, edit, dtype, network)


def _applied(graph: Graph, edit: MixedPrecision | Compression, candidate: Any, network: Mapping[str, float]) -> str:
    """Apply it with the latency that the other what-ifs go by; what it assumed."""
    before = graph.info.get("sync")
    if network:
        graph.info["sync"] = SyncModel(network.get("latency_ns", 0.0), network["ns_per_byte"])
    try:
        said = edit.assumed(graph, candidate)
        edit.apply(graph, candidate)
    finally:
        graph.info.pop("sync", None)
        if before is not None:
            graph.info["sync"] = before
    return said
