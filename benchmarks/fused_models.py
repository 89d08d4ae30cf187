"""Small models whose training steps :mod:`benchmarks.fused_kernels` takes kernels from.

A model is a loss of parameters and data, made of what real ones are made of, with as many channels as they; batches are
small, so that an op takes 10 µs to 1 ms on one core and all that a kernel touches (0.2 to 3 MB) stays in its caches: a
kernel that touches 8 MB takes 260 to 530 µs on one machine, from process to process, by where its pages lie. Each is a
function without arguments that returns (loss, arguments), of which those in the first are trained.
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

    return loss, ([(_p(384, 256), _p(256)), (_p(256, 192), _p(192)), (_p(192, 64), _p(64))], _p(320, 384), _p(320, 64))


def residual_mlp() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        for w1, w2, scale, bias in p:
            x = x + jax.nn.gelu(_layer_norm(x, scale, bias) @ w1) @ w2
        return ((x - y) ** 2).mean()

    block = (_p(192, 384), _p(384, 192), _p(192), _p(192))
    return loss, ([block, block], _p(384, 192), _p(384, 192))


def cnn_block() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        for w, scale, bias in p[:-1]:
            x = jax.nn.relu(_batch_norm(_conv(x, w), scale, bias))
        return _xent(x.mean((1, 2)) @ p[-1], y)

    p = [(_p(3, 3, 32, 64), _p(64), _p(64)), (_p(3, 3, 64, 128), _p(128), _p(128)), _p(128, 10)]
    return loss, (p, _p(2, 24, 24, 32), _p(2, 10))


def resnet_block() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        (w1, s1, b1), (w2, s2, b2), (w3, s3, b3), head = p
        h = jax.nn.relu(_batch_norm(_conv(x, w1), s1, b1))
        h = _batch_norm(_conv(h, w2), s2, b2)
        h = jax.nn.relu(h + _batch_norm(_conv(x, w3), s3, b3))
        return _xent(h.mean((1, 2)) @ head, y)

    def unit(k: int, i: int, o: int) -> Any:
        return _p(k, k, i, o), _p(o), _p(o)

    return loss, ((unit(3, 64, 128), unit(3, 128, 128), unit(1, 64, 128), _p(128, 20)), _p(3, 20, 20, 64), _p(3, 20))


def mobile_block() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        w1, depth, (s, b), (d1, d2), w2 = p
        h = jax.nn.swish(_conv(x, w1))
        h = jax.nn.hard_tanh(_batch_norm(_conv(h, depth, 192), s, b))
        gate = jax.nn.sigmoid(jax.nn.swish(h.mean((1, 2)) @ d1) @ d2)
        return jnp.abs(x + _conv(h * gate[:, None, None, :], w2) - y).mean()

    p = (_p(1, 1, 64, 192), _p(3, 3, 1, 192), (_p(192),) * 2, (_p(192, 48), _p(48, 192)), _p(1, 1, 192, 64))
    return loss, (p, _p(2, 18, 18, 64), _p(2, 18, 18, 64))


def transformer_block() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        (wq, wk, wv, wo), (s1, b1, s2, b2), (w1, w2) = p
        h = _layer_norm(x, s1, b1)
        q, k, v = (
            jnp.transpose((h @ w).reshape(*h.shape[:2], 4, -1), (0, 2, 1, 3)) for w in (wq, wk, wv)
        )  # fmt: skip
        mixed = jax.nn.softmax(q @ jnp.swapaxes(k, 2, 3) / 8) @ v
        x = x + jnp.transpose(mixed, (0, 2, 1, 3)).reshape(x.shape) @ wo
        x = x + jax.nn.gelu(_layer_norm(x, s2, b2) @ w1) @ w2
        return ((x - y) ** 2).mean()

    d = 256
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

    d, t = 192, 80
    p = ((_p(d, d),) * 4, (_p(d),) * 2, (_p(d, 512), _p(d, 512), _p(512, d)))
    return loss, (p, _p(5, t, d), _p(t, 1, 64), _p(t, 1, 64), _p(t, t), _p(5, t, d))


def lstm_cell() -> Made:
    def loss(p: Any, xs: Any, h: Any, c: Any, y: Any) -> Any:
        wx, wh, b = p
        for x in xs:
            i, f, g, o = jnp.split(x @ wx + h @ wh + b, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return ((h - y) ** 2).mean()

    n = 256
    return loss, ((_p(128, 4 * n), _p(n, 4 * n), _p(4 * n)), [_p(128, 128)] * 3, _p(128, n), _p(128, n), _p(128, n))


def gru_cell() -> Made:
    def loss(p: Any, xs: Any, h: Any, y: Any) -> Any:
        wx, wh, b = p
        for x in xs:
            xr, xz, xn = jnp.split(x @ wx + b, 3, -1)
            hr, hz, hn = jnp.split(h @ wh, 3, -1)
            z = jax.nn.sigmoid(xz + hz)
            h = (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h
        return _xent(h, y)

    n = 256
    return loss, ((_p(192, 3 * n), _p(n, 3 * n), _p(3 * n)), [_p(160, 192)] * 3, _p(160, n), _p(160, n))


def vae() -> Made:
    def loss(p: Any, x: Any, noise: Any) -> Any:
        enc, mean_w, var_w, dec, out = p
        h = jax.nn.elu(x @ enc)
        mean, log_var = h @ mean_w, h @ var_w
        z = mean + jnp.exp(0.5 * log_var) * noise
        logits = jax.nn.softplus(z @ dec) @ out
        nll = (jnp.maximum(logits, 0) - logits * x + jnp.log1p(jnp.exp(-jnp.abs(logits)))).sum(-1)
        return (nll - 0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum(-1)).mean()

    return loss, ((_p(320, 256), _p(256, 64), _p(256, 64), _p(64, 256), _p(256, 320)), _p(320, 320), _p(320, 64))


def gated_conv() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        skip = jnp.zeros(())
        for wf, wg, wo in p:
            past = jnp.pad(x, ((0, 0), (4, 0), (0, 0)))[:, :-4]
            h = jnp.tanh(x @ wf + past) * jax.nn.sigmoid(past @ wg)
            skip, x = skip + h, x + h @ wo
        return jnp.log(jnp.cosh(skip - y)).mean()

    return loss, ([(_p(128, 128),) * 3] * 2, _p(3, 300, 128), _p(3, 300, 128))


def contrastive() -> Made:
    def loss(p: Any, a: Any, b: Any) -> Any:
        def embed(x: Any) -> Any:
            h = jax.nn.leaky_relu(x @ p[0] + p[1]) @ p[2]
            return h / jnp.sqrt((h * h).sum(-1, keepdims=True) + 1e-8)

        scores = embed(a) @ embed(b).T * jnp.exp(p[3])
        same = jnp.eye(scores.shape[0])
        return _xent(scores, same) + _xent(scores.T, same)

    return loss, ((_p(384, 256), _p(256), _p(256, 96), _p()), _p(256, 384), _p(256, 384))


def group_norm_block() -> Made:
    def norm(x: Any, scale: Any, bias: Any) -> Any:
        g = x.reshape(*x.shape[:3], 4, -1)
        mean, var = g.mean((1, 2, 4), keepdims=True), g.var((1, 2, 4), keepdims=True)
        return ((g - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape) * scale + bias

    def loss(p: Any, x: Any, t: Any, y: Any) -> Any:
        w1, (s1, b1), time, (s2, b2), w2 = p
        h = _conv(jax.nn.silu(norm(x, s1, b1)), w1) + (jax.nn.silu(t) @ time)[:, None, None, :]
        return ((x + _conv(jax.nn.silu(norm(h, s2, b2)), w2) - y) ** 2).mean()

    c = 128
    p = (_p(3, 3, c, c), (_p(c), _p(c)), _p(64, c), (_p(c), _p(c)), _p(3, 3, c, c))
    return loss, (p, _p(2, 22, 22, c), _p(2, 64), _p(2, 22, 22, c))


def mixer() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        (s1, b1, t1, t2), (s2, b2, c1, c2) = p
        h = jnp.swapaxes(_layer_norm(x, s1, b1), 1, 2)
        x = x + jnp.swapaxes(jax.nn.gelu(h @ t1) @ t2, 1, 2)
        x = x + jax.nn.gelu(_layer_norm(x, s2, b2) @ c1) @ c2
        return _xent(x.mean(1), y)

    n, d = 64, 128
    p = ((_p(d), _p(d), _p(n, 96), _p(96, n)), (_p(d), _p(d), _p(d, 192), _p(192, d)))
    return loss, (p, _p(12, n, d), _p(12, d))


def squeeze_excite() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        w1, s, b, down, up, w2 = p
        h = jax.nn.relu6(_batch_norm(_conv(x, w1), s, b))
        gate = jax.nn.hard_sigmoid(jax.nn.relu(h.mean((1, 2)) @ down) @ up)
        h = _conv(h * gate[:, None, None, :], w2)
        return jnp.sqrt(((h + x - y) ** 2).mean((1, 2, 3)) + 1e-6).mean()

    p = (_p(3, 3, 64, 96), _p(96), _p(96), _p(96, 24), _p(24, 96), _p(1, 1, 96, 64))
    return loss, (p, _p(4, 18, 18, 64), _p(4, 18, 18, 64))


def adam() -> Made:
    def loss(p: Any, m: Any, v: Any, x: Any, y: Any) -> Any:
        out = jnp.zeros(())
        grads = jax.grad(lambda w: ((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2).mean())(p)
        for w, g, a, b in zip(p, grads, m, v, strict=True):
            a, b = 0.9 * a + 0.1 * g, 0.999 * b + 0.001 * g * g
            step = (a / 0.19) / (jnp.sqrt(b / 0.002) + 1e-8) + 0.01 * w
            out = out + (w - 1e-3 * step).sum()
        return out

    w = (_p(384, 320), _p(320, 256))
    return loss, (w, w, w, _p(192, 384), _p(192, 256))


def focal() -> Made:
    def loss(p: Any, x: Any, labels: Any, boxes: Any) -> Any:
        w1, b1, scores, offsets = p
        h = jax.nn.relu(x @ w1 + b1)
        chance = jnp.clip(jax.nn.sigmoid(h @ scores), 1e-4, 1 - 1e-4)
        hit = jnp.where(labels > 0.5, chance, 1 - chance)
        off = jnp.abs(h @ offsets - boxes)
        smooth = jnp.where(off < 1, 0.5 * off * off, off - 0.5)
        return (-((1 - hit) ** 2) * jnp.log(hit)).sum() / 300 + (smooth * labels.max(-1, keepdims=True)).mean()

    return loss, ((_p(128, 192), _p(192), _p(192, 80), _p(192, 64)), _p(900, 128), _p(900, 80), _p(900, 64))


def graph_attention() -> Made:
    def loss(p: Any, x: Any, mask: Any, y: Any) -> Any:
        for w, left, right in p:
            h = x @ w
            scores = jax.nn.leaky_relu((h @ left)[:, None] + (h @ right)[None, :], 0.2)
            scores = jnp.where(mask > 0.5, scores, -1e9)
            x = jax.nn.elu(jax.nn.softmax(scores) @ h)
        return _xent(x, y)

    return loss, ([(_p(96, 96), _p(96), _p(96))] * 2, _p(384, 96), _p(384, 384), _p(384, 96))


def distillation() -> Made:
    def loss(p: Any, x: Any, teacher: Any, y: Any) -> Any:
        (w1, s, b), w2 = p
        logits = jnp.tanh(_layer_norm(x @ w1, s, b)) @ w2
        soft, own = jax.nn.softmax(teacher / 4), jax.nn.log_softmax(logits / 4)
        return 16 * (soft * (jnp.log(soft + 1e-9) - own)).sum(-1).mean() + 0.5 * _xent(logits, y)

    return loss, (((_p(256, 224), _p(224), _p(224)), _p(224, 320)), _p(320, 256), _p(320, 320), _p(320, 320))


def instance_norm() -> Made:
    def norm(x: Any, scale: Any, bias: Any) -> Any:
        mean = x.mean((1, 2), keepdims=True)
        var = ((x - mean) ** 2).mean((1, 2), keepdims=True)
        return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias

    def loss(p: Any, x: Any, y: Any) -> Any:
        (w1, s1, b1), (w2, s2, b2) = p
        h = jax.nn.leaky_relu(norm(_conv(x, w1), s1, b1), 0.1)
        h = x + norm(_conv(h, w2), s2, b2)
        flat = h.reshape(h.shape[0], -1, h.shape[-1])
        gram = jnp.swapaxes(flat, 1, 2) @ flat / flat.shape[1]
        return ((gram - y) ** 2).mean() + jnp.abs(h[:, 1:] - h[:, :-1]).mean()

    c = 64
    p = ((_p(3, 3, c, c), _p(c), _p(c)), (_p(3, 3, c, c), _p(c), _p(c)))
    return loss, (p, _p(4, 20, 20, c), _p(4, c, c))


def gated_experts() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        gate, w1, w2 = p
        share = jax.nn.softmax(x @ gate)
        share = share * (share >= share.max(-1, keepdims=True))
        h = jax.nn.silu(jnp.einsum("nd,edh->enh", x, w1))
        out = jnp.einsum("enh,ehd->end", h, w2)
        mixed = (out * jnp.swapaxes(share, 0, 1)[:, :, None]).sum(0)
        return jnp.abs(mixed + x - y).mean() + (share.mean(0) ** 2).sum()

    return loss, ((_p(128, 4), _p(4, 128, 192), _p(4, 192, 128)), _p(192, 128), _p(192, 128))


def mixture_density() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        w1, b1, w2 = p
        mean, log_scale, logits = jnp.split(jax.nn.softplus(x @ w1 + b1) @ w2, 3, -1)
        z = (y - mean) * jnp.exp(-log_scale)
        log_p = jax.nn.log_softmax(logits) - 0.5 * z * z - log_scale
        most = log_p.max(-1, keepdims=True)
        return -(jnp.log(jnp.exp(log_p - most).sum(-1, keepdims=True)) + most).mean()

    return loss, ((_p(192, 256), _p(256), _p(256, 3 * 128)), _p(512, 192), _p(512, 1))


def u_block() -> Made:
    def loss(p: Any, x: Any, y: Any) -> Any:
        w1, w2, w3 = p
        h = jnp.tanh(_conv(x, w1))
        n, height, width, c = h.shape
        small = h.reshape(n, height // 2, 2, width // 2, 2, c).mean((2, 4))
        small = jax.nn.relu(_conv(small, w2))
        large = jnp.broadcast_to(small[:, :, None, :, None, :], (n, height // 2, 2, width // 2, 2, c))
        out = jax.nn.sigmoid(_conv(jnp.concatenate([large.reshape(h.shape), h], -1), w3))
        return 1 - (2 * (out * y).sum((1, 2)) / ((out + y).sum((1, 2)) + 1e-3)).mean()

    p = (_p(3, 3, 32, 48), _p(3, 3, 48, 48), _p(1, 1, 96, 32))
    return loss, (p, _p(4, 24, 24, 32), _p(4, 24, 24, 32))


#: By name. Four sets, of which each is held out once; a set has no two of a kind.
FOLDS: tuple[dict[str, Callable[[], Made]], ...] = (
    {"transformer_block": transformer_block, "cnn_block": cnn_block, "vae": vae, "focal": focal, "mixer": mixer},
    {
        "lstm_cell": lstm_cell, "resnet_block": resnet_block, "contrastive": contrastive, "adam": adam,
        "gated_experts": gated_experts, "instance_norm": instance_norm,
    },
    {
        "mlp": mlp, "llama_block": llama_block, "group_norm_block": group_norm_block,
        "graph_attention": graph_attention, "squeeze_excite": squeeze_excite, "mixture_density": mixture_density,
    },
    {
        "gru_cell": gru_cell, "mobile_block": mobile_block, "residual_mlp": residual_mlp, "gated_conv": gated_conv,
        "distillation": distillation, "u_block": u_block,
    },
)  # fmt: skip
