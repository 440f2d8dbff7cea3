"""Refining cuts every routed group into equal parts without changing what the student computes, so that training goes on.

A part starts with its group's router row. With `parts` times as many parts selected, a token's parts are those of the
groups it had, each with its group's weight (the softmax shares it among them and the factor `active` grows as much). A
small push along what tells the parts apart then lets the router choose between them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.train.chats import Chat
from engine.train.split import LayerSplit, SplitShape, group_neurons
from engine.train.student import RoutedMLP, Student

_PUSH = 0.25  # spread of the logits among the parts of a group, in units of the logits' spread among the groups


def finer(shape: SplitShape, parts: int) -> SplitShape:
    """The shape with every group cut into `parts`; as large a share of the neurons is active as before."""
    if shape.size % parts:
        raise ValueError(f"groups of {shape.size} neurons cannot be cut into {parts} equal parts")
    return SplitShape(shape.shared, shape.experts * parts, shape.size // parts, shape.active * parts)


@torch.no_grad()
def refine(
    student: Student, teacher: LlamaForCausalLM, chats: list[Chat], parts: int, seed: int, push: float = _PUSH
) -> Student:
    """A student with finer groups that has learned what `student` has. The chats show which neurons work together."""
    shape = finer(student.shape, parts)
    inputs = _mlp_inputs(student, chats)
    cuts = [_cut(layer.mlp, x, parts, push) for layer, x in zip(student.lm.model.layers, inputs)]
    result = Student(teacher, [split for split, _ in cuts], shape, student.rank, seed)
    old = student.trained()
    for name, tensor in result.trained().items():
        if name.endswith("router"):
            continue  # the split has it
        learned, move = old[name], cuts[int(name.split(".")[1])][1]
        if name.endswith(("gate_proj.b", "up_proj.b")):
            learned = learned[move]
        elif name.endswith("down_proj.a"):
            learned = learned[:, move]
        tensor.copy_(learned)
    result.merge()
    return result


def _mlp_inputs(student: Student, chats: list[Chat]) -> list[Tensor]:
    """The input of every MLP at every position of the chats: per layer [tokens, hidden] float32."""
    student.merge()
    inputs: list[list[Tensor]] = [[] for _ in student.lm.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].flatten(0, -2)))
        for layer, kept in zip(student.lm.model.layers, inputs)
    ]
    for chat in chats:
        student.hidden(chat.ids[None])
    for hook in hooks:
        hook.remove()
    return [torch.cat(kept) for kept in inputs]


def _cut(mlp: RoutedMLP, x: Tensor, parts: int, push: float) -> tuple[LayerSplit, Tensor]:
    """The finer split of one layer for inputs x [tokens, hidden], and where in the old order its neurons stood."""
    shape = mlp.shape
    hidden = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    down = mlp.down_proj.merged
    size_of = hidden.abs() * down.norm(dim=0)
    size_of = size_of / (hidden @ down.T).norm(dim=1, keepdim=True)
    logits = x @ mlp.router.T
    spread = (logits - logits.mean(1, keepdim=True)).std()
    normal = x.T @ x
    normal.diagonal().add_(1e-2 * normal.diagonal().mean())
    moves, routers = [torch.arange(shape.shared)], []
    for group in range(shape.experts):
        first = shape.shared + group * shape.size
        members = size_of[:, first : first + shape.size]
        chosen = group_neurons(members.T.contiguous(), parts)
        moves.append(first + chosen.flatten())
        amount = torch.stack([members[:, part].square().sum(1).sqrt() for part in chosen], 1)
        amount = amount - amount.mean(1, keepdim=True)
        direction = torch.linalg.solve(normal, x.T @ amount).T
        routers.append(mlp.router[group] + direction * (push * spread / (x @ direction.T).std().clamp_min(1e-9)))
    move = torch.cat(moves)
    down_proj = mlp.down_proj
    return LayerSplit(mlp.order[move], torch.cat(routers), down_proj.a[:, move], down_proj.b.clone()), move
