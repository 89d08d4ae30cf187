"""A graph as bytes, for other ranks of the job: what a search needs of it, and no code.

Knows columns, edges, tensors and buckets. Of ``info`` only numbers, texts and tables of numbers go along; whoever needs
more adds it.
"""

from __future__ import annotations

import io
import json
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import numpy as np

from dpro.errors import DproError
from dpro.graph.graph import Bucket, Graph, TensorInfo

#: Of zlib: all ranks but one wait for it.
_LEVEL = 1
_PLAIN = (int, float, str, bool)
_COLUMNS = ("kind", "resource", "duration", "gap", "priority", "tensor", "rank", "name", "nbytes")


def pack(graph: Graph) -> bytes:
    """The living ops of ``graph``."""
    small, _ = graph.subgraph(graph.column("alive").copy())
    told = {
        "names": small.name_table,
        "resources": small.resource_names,
        "tensors": [[t.name, t.nbytes, t.dtype, t.ready] for t in small.tensors],
        "buckets": [[list(b.tensors), b.nbytes, list(b.ops)] for b in small.buckets],
        "ranks": small.ranks,
        "info": {key: value for key, value in small.info.items() if isinstance(value, _PLAIN)},
        "main_resource": sorted(small.info.get("main_resource", {}).items()),
    }
    rows: dict[str, Any] = {f"op_{key}": small.column(key) for key in _COLUMNS}
    for key in ("out_op", "in_op"):
        rows[key] = np.array([(*k, op) for k, op in getattr(small, key).items()], "i4")
    rows["told"] = np.frombuffer(json.dumps(told).encode(), dtype=np.uint8)
    rows["edges"] = small.edges()
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED, compresslevel=_LEVEL) as packed:  # numpy's own level takes twice as long
        for key, column in rows.items():
            with packed.open(f"{key}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(column), allow_pickle=False)
    return buffer.getvalue()


def unpack(blob: bytes) -> Graph:
    """The graph that :func:`pack` packed.

    Raises:
        DproError: anything else.
    """
    try:
        with np.load(io.BytesIO(blob), allow_pickle=False) as packed:
            told: dict[str, Any] = json.loads(packed["told"].tobytes())
            columns = {key: packed[f"op_{key}"] for key in _COLUMNS}
            edges, ends = packed["edges"], [packed[key].reshape(-1, 3).tolist() for key in ("out_op", "in_op")]
        graph = Graph()
        for name in told["resources"]:
            graph.resource(name)
        for name in told["names"]:
            graph.name(name)
        names, kinds = columns.pop("name"), columns.pop("kind")
        graph.add_ops(names, kinds, len(kinds), **columns)
        graph.add_edges(edges)
        graph.tensors = [TensorInfo(*fields) for fields in told["tensors"]]
        graph.buckets = [Bucket(tuple(tensors), nbytes, tuple(ops)) for tensors, nbytes, ops in told["buckets"]]
        graph.out_op, graph.in_op = ({(rank, tensor): op for rank, tensor, op in rows} for rows in ends)
        graph.ranks, graph.info = told["ranks"], told["info"]
        graph.info["main_resource"] = dict(told["main_resource"])
    except (ValueError, KeyError, TypeError, OSError, EOFError, BadZipFile) as error:
        raise DproError(f"not a packed graph ({error})") from error
    return graph
