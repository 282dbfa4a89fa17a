"""The style sheet of the page of a plan: light and dark by the reader's own setting, one column on narrow screens."""

from __future__ import annotations

from hetpipe.report.pipeline_picture import PICTURE_CSS

_PAGE_CSS = """
:root{
  color-scheme:light dark;
  --paper:#fbfaf8;--card:#fff;--ink:#1d2129;--faint:#626a78;--rule:#e3e1dc;--lane:#efede8;
  --forward:#8fbbe8;--backward:#4f86c6;--transfers:#e0a63a;--on-box:#0d1b2a;
  --weights:#4a9d7c;--activations:#9fd3bd;--reserve:#9aa0aa;
  --push:#b0568f;--pull:#7d6bc4;--wait:#f3c9c0;--accent:#c0392b;--accent-paper:#fdf0ed;
}
@media (prefers-color-scheme:dark){:root{
  --paper:#14171c;--card:#1c2027;--ink:#e8e6e1;--faint:#9aa2b0;--rule:#2d333d;--lane:#262b34;
  --forward:#7fb0e0;--backward:#5590d2;--transfers:#e0a63a;--on-box:#08121d;
  --weights:#4fae89;--activations:#8cc7ae;--reserve:#7b828e;
  --push:#d683b8;--pull:#a596e8;--wait:#6b3a33;--accent:#ff8a75;--accent-paper:#2b1f1e;
}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 ui-sans-serif,system-ui,sans-serif;
  font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:26px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:36px 0 10px}
h3{font-size:15px;margin:22px 0 8px}
p{margin:0 0 8px;max-width:75ch}
.faint,.subtitle,footer{color:var(--faint)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:16px 18px;margin:14px 0}
.bound{border-left:4px solid var(--accent);background:var(--accent-paper)}
.bound p,.remark p{margin:0}
.remark{border-left:4px solid var(--transfers)}
.speeds{display:grid;grid-template-columns:max-content max-content minmax(80px,1fr);gap:8px 16px;align-items:center}
.speeds .name{font-weight:600}
.speeds .figure{text-align:right}
.speeds .note{grid-column:3;margin-top:-6px;color:var(--faint);font-size:13px}
.speeds .first{font-size:22px;font-weight:700;color:var(--backward)}
.bar{display:flex;height:14px;border-radius:4px;overflow:hidden;background:var(--lane)}
.bar i{display:block;flex:none}
.forward{background:var(--forward)}.backward{background:var(--backward)}.transfers{background:var(--transfers)}
.weights{background:var(--weights)}.activations{background:var(--activations)}.reserve{background:var(--reserve)}
.push{background:var(--push)}.pull{background:var(--pull)}.wait{background:var(--wait)}.lane{background:var(--lane)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th{font-weight:500;color:var(--faint);font-size:13px;text-align:left;padding:4px 14px 4px 0;white-space:nowrap}
td{padding:7px 14px 7px 0;border-top:1px solid var(--rule);vertical-align:top}
th:last-child,td:last-child{padding-right:0}
.number{text-align:right}
.stages{padding:8px 18px}
.stages table{table-layout:fixed}
.stages th:nth-child(1){width:4%}.stages th:nth-child(2){width:16%}.stages th:nth-child(3){width:21%}
.stages th:nth-child(4){width:23%}.stages th:nth-child(5){width:19%}.stages th:nth-child(6){width:8%}
.stages .bar{margin:5px 0 3px}
.stages small{display:block;color:var(--faint);font-size:13px;overflow-wrap:anywhere}
.tag{border:1px solid var(--rule);border-radius:9px;padding:0 7px;font-size:12px;color:var(--faint);white-space:nowrap}
.tag.longest{color:var(--accent);border-color:var(--accent);font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:10px 0 0;padding:0;list-style:none;
  font-size:13px;color:var(--faint)}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 18px;margin:0}
dt{color:var(--faint)}dd{margin:0;overflow-wrap:anywhere}
figure{margin:0}figcaption{color:var(--faint);font-size:13px;margin-bottom:8px}
svg{display:block}
footer{margin-top:40px;font-size:13px}
@media (max-width:720px){
  main{padding:20px 12px 48px}
  .speeds{grid-template-columns:1fr max-content}
  .speeds .bar,.speeds .note{grid-column:1/-1}
  .stages tr{display:grid;grid-template-columns:max-content 1fr 1fr;gap:4px 14px;padding:10px 0}
  .stages tr+tr{border-top:1px solid var(--rule)}
  .stages td{border:0;padding:0;text-align:left}
  .stages td.wide,.why td:last-child{grid-column:1/-1}
  .stages thead,.why thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
  .why tr{display:grid;grid-template-columns:1fr max-content;gap:2px 14px;padding:8px 0}
  .why tr+tr{border-top:1px solid var(--rule)}
  .why td{border:0;padding:0}.why td:last-child{color:var(--faint)}
  .stages td[data-label]::before{content:attr(data-label) " ";color:var(--faint);font-size:13px}
  dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:8px}
}
"""

STYLE = _PAGE_CSS + PICTURE_CSS
