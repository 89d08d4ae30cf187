"""Small models whose training steps :mod:`benchmarks.fused_kernels` takes kernels from.

A model is a loss of parameters and data, made of what real ones are made of; sizes are such that an op takes 5 µs to 1
ms on one core. Each is a function without arguments that returns (loss, arguments), of which those in the first are
trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _p(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _xent(logits: Any, labels: Any) -> Any:
    return -(jax.nn.log_softmax(logits) * labels).sum(-1).mean()


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def _batch_norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean((0, 1, 2))
    var = (x * x).mean((0, 1, 2)) - mean * mean
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def _conv(x: Any, w: Any, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def mlp() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        for w, b in p[:-1]:
            x = jax.nn.relu(x @ w + b)
        return _xent(x @ p[-1][0] + p[-1][1], y)

    return loss, ([(_p(384, 256), _p(256)), (_p(256, 192), _p(192)), (_p(192, 64), _p(64))], _p(160, 384), _p(160, 64))


def residual_mlp() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        for w1, w2, scale, bias in p:
            x = x + jax.nn.gelu(_layer_norm(x, scale, bias) @ w1) @ w2
        return ((x - y) ** 2).mean()

    block = (_p(192, 384), _p(384, 192), _p(192), _p(192))
    return loss, ([block, block], _p(224, 192), _p(224, 192))


def cnn_block() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        for w, scale, bias in p[:-1]:
            x = jax.nn.relu(_batch_norm(_conv(x, w), scale, bias))
        return _xent(x.mean((1, 2)) @ p[-1], y)

    p = [(_p(3, 3, 8, 16), _p(16), _p(16)), (_p(3, 3, 16, 24), _p(24), _p(24)), _p(24, 10)]
    return loss, (p, _p(8, 24, 24, 8), _p(8, 10))


def resnet_block() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        (w1, s1, b1), (w2, s2, b2), (w3, s3, b3), head = p
        h = jax.nn.relu(_batch_norm(_conv(x, w1), s1, b1))
        h = _batch_norm(_conv(h, w2), s2, b2)
        h = jax.nn.relu(h + _batch_norm(_conv(x, w3), s3, b3))
        return _xent(h.mean((1, 2)) @ head, y)

    def unit(k: int, i: int, o: int) -> Any:
        return _p(k, k, i, o), _p(o), _p(o)

    return loss, ((unit(3, 16, 32), unit(3, 32, 32), unit(1, 16, 32), _p(32, 20)), _p(6, 20, 20, 16), _p(6, 20))


def mobile_block() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        w1, depth, (s, b), (d1, d2), w2 = p
        h = jax.nn.swish(_conv(x, w1))
        h = jax.nn.hard_tanh(_batch_norm(_conv(h, depth, 36), s, b))
        gate = jax.nn.sigmoid(jax.nn.swish(h.mean((1, 2)) @ d1) @ d2)
        return jnp.abs(x + _conv(h * gate[:, None, None, :], w2) - y).mean()

    p = (_p(1, 1, 12, 36), _p(3, 3, 1, 36), (_p(36), _p(36)), (_p(36, 9), _p(9, 36)), _p(1, 1, 36, 12))
    return loss, (p, _p(7, 18, 18, 12), _p(7, 18, 18, 12))


def transformer_block() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        (wq, wk, wv, wo), (s1, b1, s2, b2), (w1, w2) = p
        h = _layer_norm(x, s1, b1)
        q, k, v = (
            jnp.transpose((h @ w).reshape(*h.shape[:2], 4, -1), (0, 2, 1, 3)) for w in (wq, wk, wv)
        )  # fmt: skip
        mixed = jax.nn.softmax(q @ jnp.swapaxes(k, 2, 3) / 5.66) @ v
        x = x + jnp.transpose(mixed, (0, 2, 1, 3)).reshape(x.shape) @ wo
        x = x + jax.nn.gelu(_layer_norm(x, s2, b2) @ w1) @ w2
        return ((x - y) ** 2).mean()

    d = 128
    p = ((_p(d, d),) * 4, (_p(d),) * 4, (_p(d, 4 * d), _p(4 * d, d)))
    return loss, (p, _p(4, 64, d), _p(4, 64, d))


def llama_block() -> Made:
    def rms(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    def turn(x: Any, cos: Any, sin: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-b, a], -1) * sin

    def loss(p: Any, x: Any, cos: Any, sin: Any, mask: Any, y: Any) -> Any:
        (wq, wk, wv, wo), (s1, s2), (gate, up, down) = p
        h = rms(x, s1)
        q, k, v = ((h @ w).reshape(*h.shape[:2], 3, -1) for w in (wq, wk, wv))
        scores = jnp.einsum("bqhd,bkhd->bhqk", turn(q, cos, sin), turn(k, cos, sin)) + mask
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ wo
        h = rms(x, s2)
        return _xent(x + (jax.nn.silu(h @ gate) * (h @ up)) @ down, y)

    d, t = 96, 80
    p = ((_p(d, d),) * 4, (_p(d),) * 2, (_p(d, 256), _p(d, 256), _p(256, d)))
    return loss, (p, _p(3, t, d), _p(t, 1, 32), _p(t, 1, 32), _p(t, t), _p(3, t, d))


def lstm_cell() -> Made:
    def loss(p: Any, xs: Any, h: Any, c: Any, y: Any) -> Any:
        wx, wh, b = p
        for x in xs:
            i, f, g, o = jnp.split(x @ wx + h @ wh + b, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return ((h - y) ** 2).mean()

    n = 160
    return loss, ((_p(96, 4 * n), _p(n, 4 * n), _p(4 * n)), [_p(96, 96)] * 3, _p(96, n), _p(96, n), _p(96, n))


def gru_cell() -> Made:
    def loss(p: Any, xs: Any, h: Any, y: Any) -> Any:
        wx, wh, b = p
        for x in xs:
            xr, xz, xn = jnp.split(x @ wx + b, 3, -1)
            hr, hz, hn = jnp.split(h @ wh, 3, -1)
            z = jax.nn.sigmoid(xz + hz)
            h = (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h
        return _xent(h, y)

    n = 144
    return loss, ((_p(112, 3 * n), _p(n, 3 * n), _p(3 * n)), [_p(128, 112)] * 3, _p(128, n), _p(128, n))


def vae() -> Made:
    def loss(p: Any, x: Any, noise: Any) -> Any:
        enc, mean_w, var_w, dec, out = p
        h = jax.nn.elu(x @ enc)
        mean, log_var = h @ mean_w, h @ var_w
        z = mean + jnp.exp(0.5 * log_var) * noise
        logits = jax.nn.softplus(z @ dec) @ out
        nll = (jnp.maximum(logits, 0) - logits * x + jnp.log1p(jnp.exp(-jnp.abs(logits)))).sum(-1)
        return (nll - 0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum(-1)).mean()

    return loss, ((_p(320, 200), _p(200, 48), _p(200, 48), _p(48, 200), _p(200, 320)), _p(120, 320), _p(120, 48))


def gated_conv() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        skip = jnp.zeros(())
        for wf, wg, wo in p:
            past = jnp.pad(x, ((0, 0), (4, 0), (0, 0)))[:, :-4]
            h = jnp.tanh(x @ wf + past) * jax.nn.sigmoid(past @ wg)
            skip, x = skip + h, x + h @ wo
        return jnp.log(jnp.cosh(skip - y)).mean()

    return loss, ([(_p(40, 40),) * 3] * 2, _p(5, 300, 40), _p(5, 300, 40))


def contrastive() -> Made:
    def loss(p: Any, a: Any, b: Any) -> Any:
        def embed(x: Any) -> Any:
            h = jax.nn.leaky_relu(x @ p[0] + p[1]) @ p[2]
            return h / jnp.sqrt((h * h).sum(-1, keepdims=True) + 1e-8)

        scores = embed(a) @ embed(b).T * jnp.exp(p[3])
        same = jnp.eye(scores.shape[0])
        return _xent(scores, same) + _xent(scores.T, same)

    return loss, ((_p(280, 176), _p(176), _p(176, 72), _p()), _p(176, 280), _p(176, 280))


def group_norm_block() -> Made:
    def norm(x: Any, scale: Any, bias: Any) -> Any:
        g = x.reshape(*x.shape[:3], 4, -1)
        mean, var = g.mean((1, 2, 4), keepdims=True), g.var((1, 2, 4), keepdims=True)
        return ((g - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape) * scale + bias

    def loss(p: Any, x: Any, t: Any, y: Any) -> Any:
        w1, (s1, b1), time, (s2, b2), w2 = p
        h = _conv(jax.nn.silu(norm(x, s1, b1)), w1) + (jax.nn.silu(t) @ time)[:, None, None, :]
        return ((x + _conv(jax.nn.silu(norm(h, s2, b2)), w2) - y) ** 2).mean()

    c = 20
    p = (_p(3, 3, c, c), (_p(c), _p(c)), _p(64, c), (_p(c), _p(c)), _p(3, 3, c, c))
    return loss, (p, _p(5, 22, 22, c), _p(5, 64), _p(5, 22, 22, c))


#: By name. Four sets, of which each is held out once; a set has no two of a kind.
FOLDS: tuple[dict[str, Callable[[], Made]], ...] = (
    {"transformer_block": transformer_block, "cnn_block": cnn_block, "vae": vae},
    {"lstm_cell": lstm_cell, "resnet_block": resnet_block, "contrastive": contrastive},
    {"mlp": mlp, "llama_block": llama_block, "group_norm_block": group_norm_block},
    {"gru_cell": gru_cell, "mobile_block": mobile_block, "residual_mlp": residual_mlp, "gated_conv": gated_conv},
)
