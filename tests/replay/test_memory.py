"""The peak of a replayed schedule, by hand: what is live, and where."""

from __future__ import annotations

from dataclasses import replace

from dpro.graph.graph import Graph
from dpro.passes.recompute import Recompute
from dpro.replay.engine import replay
from dpro.replay.memory import of_micro_batch, peak_bytes
from tests.passes.memory_graphs import BASE, chain_graph, chain_profile


def peak(graph: Graph, *blocks: str) -> int:
    mark = Recompute().apply(graph, blocks) if blocks else graph.mark()
    try:
        return peak_bytes(graph, replay(graph))[0]
    finally:
        graph.undo(mark)


def test_plain() -> None:
    """Highest in the last forward pass (nothing is freed before): all that is saved and handed on, and its 1 byte."""
    graph = chain_graph(chain_profile([100, 200, 300], [10, 20, 30]), [1, 1, 1], [2, 2, 2])
    assert peak(graph) == BASE + 660 + 1


def test_recomputed_block_holds_its_input_only() -> None:
    """Layer 2 keeps its input (20) alone: as its second forward pass begins, layers 0 and 1 hold 300 and hand on 30. It
    makes 300 and its output's 30 again, with 1 byte to spare: no less than before but for the first output."""
    graph = chain_graph(chain_profile([100, 200, 300], [10, 20, 30]), [1, 1, 1], [2, 2, 2])
    assert peak(graph, "net.2") == BASE + 300 + 30 + 330 + 1
    # with 0 and 1 recomputed as well there are but their inputs: (10 + 20) and layer 2 at work
    assert peak(graph, "net.0", "net.1", "net.2") == BASE + 30 + 330 + 1
    assert peak(graph) == BASE + 660 + 1  # and nothing is left of it


def test_a_run_is_one_block() -> None:
    """Layers 1 and 2 as one: in its second pass there is what layer 0 holds, and all of both again."""
    graph = chain_graph(chain_profile([100, 200, 300], [10, 20, 30]), [1, 1, 1], [2, 2, 2])
    assert peak(graph, "net.1..2") == BASE + 110 + (200 + 20 + 300 + 30) + 1


def test_a_block_whose_backward_pass_is_late() -> None:
    """Layer 1's 200 bytes are let go of in the update (gradients of weights that TensorFlow runs last), and layer 0's
    backward pass takes 500. Run again, they are there as long, unless all of the block is over before that."""
    profile = chain_profile([100, 200], [10, 20])
    held = [replace(one, freed=7) if one.nbytes == 200 else one for one in profile.held]
    rise = [500 if segment == 6 else nbytes for segment, nbytes in enumerate(profile.rise)]
    late = replace(profile, held=tuple(held), rise=tuple(rise))
    assert peak(chain_graph(late, [1, 1], [2, 2])) == BASE + 100 + 200 + 500
    assert peak(chain_graph(late, [1, 1], [2, 2]), "net.1") == BASE + 100 + 200 + 500
    assert peak(chain_graph(replace(late, settles=True), [1, 1], [2, 2]), "net.1") == BASE + 100 + 500


def test_gradients_stay() -> None:
    """40 bytes a layer: in the backward pass of layer 0 those of all three are there, and what layer 0 saved."""
    graph = chain_graph(chain_profile([500, 1, 1], [1, 1, 1], gradient=400), [1, 1, 1], [2, 2, 2])
    assert peak(graph) == BASE + 500 + 3 * 400 + 1


def test_micro_batch() -> None:
    """Of 4 micro-batches the last one has a fourth of the activations, and all gradients from its begin."""
    profile = of_micro_batch(chain_profile([400, 800], [40, 80], gradient=1000), 4)
    graph = chain_graph(profile, [1, 1], [2, 2])
    # at the begin of layer 1's backward pass: a fourth of what is saved and handed on (the loss let 80 go), the
    # gradients of both, and a further one that is added to one of them
    assert peak(graph) == BASE + (400 + 800 + 40) // 4 + 2000 + 1000
