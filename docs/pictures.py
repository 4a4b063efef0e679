#!/usr/bin/env python3
"""Draws the pictures of README and book as SVG: `docs/pictures.py`. Needs no packages.
docs/memory.svg: model state per rank by stage and number of ranks, by the formulas of ZeRO (arXiv:1910.02054) for fp32 and AdamW.
docs/book/src/step.svg: what one rank holds and exchanges in a step of stage 3."""
import pathlib

here = pathlib.Path(__file__).parent
FONT, INK, COLORS = "font-family='sans-serif'", "#333", {"parameters": "#4878a8", "gradients": "#e49444", "optimizer state": "#85a869"}

def svg(name, width, height, title, body):
    (here / name).write_text(
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img'>\n"
        f"<title>{title}</title>\n<rect width='{width}' height='{height}' fill='white'/>\n" + "\n".join(body) + "\n</svg>\n")

def text(x, y, words, size=12, anchor="start", weight="normal", color=INK):
    return f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' text-anchor='{anchor}' font-weight='{weight}' fill='{color}'>{words}</text>"

def rect(x, y, width, height, color, stroke="none", dash=""):
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' fill='{color}' stroke='{stroke}' stroke-dasharray='{dash}'/>"

def arrow(x, y, to_x, to_y):
    return f"<line x1='{x}' y1='{y}' x2='{to_x}' y2='{to_y}' stroke='{INK}' stroke-width='1.5' marker-end='url(#head)'/>"

HEAD = f"<defs><marker id='head' markerWidth='8' markerHeight='8' refX='7' refY='4' orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='{INK}'/></marker></defs>"

def memory():
    bytes_of = lambda stage, ranks: {"parameters": 4 / (ranks if stage >= 3 else 1), "gradients": 4 / (ranks if stage >= 2 else 1), "optimizer state": 8 / (ranks if stage >= 1 else 1)}
    body, per_byte = [text(20, 24, "Model state per rank: fp32, AdamW, bytes per parameter", 14, weight="bold")], 22
    for i, (kind, color) in enumerate(COLORS.items()): body += [rect(430 + 105 * i, 14, 12, 12, color), text(446 + 105 * i, 24, kind)]
    y = 48
    for ranks in (2, 8):
        body.append(text(20, y + 14, f"{ranks} ranks", weight="bold"))
        for stage in range(4):
            x, state = 130, bytes_of(stage, ranks)
            body.append(text(x - 8, y + 14, f"stage {stage}", anchor="end"))
            for kind, size in state.items():
                body.append(rect(x, y, size * per_byte, 20, COLORS[kind]))
                x += size * per_byte
            body.append(text(x + 8, y + 14, f"{sum(state.values()):g}"))
            y += 26
        y += 14
    svg("memory.svg", 760, y, "Model state per rank by ZeRO stage", body)

def step():
    body = [HEAD, text(20, 24, "A step of stage 3 on two ranks", 14, weight="bold")]
    columns = [("forward, backward", "all-gather each parameter before its use,", "release it after"), ("backward", "reduce-scatter each gradient", "as soon as its bucket is full"), ("optimizer", "update its shard, and publish it", "for the next gathers")]
    for rank in range(2):
        y = 70 + 120 * rank
        body.append(text(20, y + 32, f"rank {rank}", weight="bold"))
        for i in range(3):
            x = 100 + 235 * i
            mine = x + 34 * rank
            for kind, dy in zip(COLORS, (0, 22, 44)):
                full = (i == 0 and kind == "parameters") or (i == 1 and kind == "gradients")
                body += [rect(x, y + dy, 68, 18, "white", "#aaa", "3 3"), rect(x if full else mine, y + dy, 68 if full else 34, 18, COLORS[kind])]
                if full: body.append(rect(mine, y + dy, 34, 18, "none", INK))
                if i == 0: body.append(text(x + 76, y + dy + 13, kind, 11))
    for i, words in enumerate(columns):
        x = 100 + 235 * i
        body += [text(x, 52, words[0], 12, weight="bold"), text(x, 290, words[1], 11), text(x, 305, words[2], 11)]
        if i < 2: body.append(arrow(x + 178, 150, x + 222, 150))
    body += [arrow(120, 134, 120, 188), arrow(148, 188, 148, 134), arrow(355, 134, 355, 188), arrow(383, 188, 383, 134)]
    svg("book/src/step.svg", 800, 320, "A step of ZeRO stage 3 on two ranks", body)

memory()
step()
