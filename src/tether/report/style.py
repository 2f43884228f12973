"""Style and behaviour of the page: one style sheet, and a script that only copies hover texts below their chart."""

CSS = """
:root { color-scheme: light dark;
  --page: #fafaf8; --card: #ffffff; --ink: #1b1d20; --soft: #565b63; --faint: #767b84; --rule: #e4e4e0;
  --grid: #ededea;
  --c1: #2767cf; --c2: #d2601a; --c3: #12887a; --c4: #8456cc; --c5: #b07d0c; --c6: #7a8089; --c7: #b8457f;
  --ok: #17774a; --warn: #8f6200; --act: #bb2d25; --info: #565b63;
  --ok-tint: #e8f4ed; --warn-tint: #faf1da; --act-tint: #fbeae8; --info-tint: #f0f0ed; }
@media (prefers-color-scheme: dark) { :root {
  --page: #131417; --card: #1b1c20; --ink: #e9eaec; --soft: #a8adb5; --faint: #8a9099; --rule: #2d2f35;
  --grid: #26282d;
  --c1: #6ba1f5; --c2: #f2935a; --c3: #45bfae; --c4: #b296f2; --c5: #d9b048; --c6: #8f959e; --c7: #ec84b4;
  --ok: #56c48d; --warn: #ddb04a; --act: #f37f76; --info: #a8adb5;
  --ok-tint: #172a20; --warn-tint: #2c2514; --act-tint: #331c1b; --info-tint: #24262b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial,
  sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 32px 28px 64px; }
h1, h2, h3, p, figure, dl, dd, ul { margin: 0; padding: 0; }
h1 { font-size: 15px; font-weight: 600; color: var(--soft); overflow-wrap: anywhere; }
h2 { font-size: 20px; font-weight: 650; margin: 52px 0 4px; letter-spacing: -.01em; }
h3 { font-size: 13px; font-weight: 600; color: var(--soft); margin: 26px 0 10px; }
.lead { color: var(--soft); max-width: 84ch; margin-bottom: 16px; }
.setup { color: var(--faint); font-size: 13.5px; margin-top: 2px; overflow-wrap: anywhere; }
.verdict { font-size: clamp(20px, 2.6vw, 27px); line-height: 1.3; letter-spacing: -.015em; font-weight: 600;
  max-width: 40em; margin: 24px 0 8px; text-wrap: pretty; }
.verdict b.ok { color: var(--ok); } .verdict b.warn { color: var(--warn); } .verdict b.act { color: var(--act); }
.tiles { margin-top: 22px; display: flex; flex-wrap: wrap; gap: 1px;
  background: var(--rule); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden; }
.tile { flex: 1 1 176px; background: var(--card); padding: 14px 16px 13px; }
.tile dt { font-size: 13px; color: var(--soft); }
.tile dd { font-size: 21px; font-weight: 600; letter-spacing: -.01em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile dd.detail { font-size: 13px; font-weight: 400; color: var(--faint); white-space: normal; letter-spacing: 0; }
.notes { margin: 18px 0 0; padding: 11px 16px; list-style: none; background: var(--warn-tint);
  border-radius: 8px; font-size: 14px; }
.notes li { overflow-wrap: anywhere; }
.status { margin-top: 16px; font-size: 14px; } .status a { color: inherit; text-underline-offset: 3px; }
.first { margin-top: 6px; font-size: 14px; max-width: 75ch; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 14px; }
figure { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 13px 14px 9px;
  min-width: 0; }
.top { display: flex; justify-content: space-between; gap: 12px; align-items: baseline; }
.top b { font-weight: 600; min-width: 0; overflow-wrap: anywhere; }
.top span { font-variant-numeric: tabular-nums; white-space: nowrap; color: var(--soft); font-size: 14px; }
.caption { font-size: 12.5px; line-height: 1.4; color: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: 0 12px; font-size: 12.5px; color: var(--soft); min-height: 19px; }
.legend i { display: inline-block; width: 9px; height: 9px; border-radius: 2.5px; margin-right: 5px; }
svg { display: block; width: 100%; height: auto; margin-top: 4px; overflow: visible; }
output { display: block; min-height: 16px; margin-top: -2px; font-size: 12px; line-height: 16px; color: var(--soft);
  font-variant-numeric: tabular-nums; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
.c5 { --c: var(--c5); }
.c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.legend i { background: var(--c); }
.grid { stroke: var(--grid); } .grid.zero, .axis { stroke: var(--rule); }
.tick, .name { font-size: 12px; fill: var(--faint); } .note { font-size: 11.5px; fill: var(--soft);
  paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.line.faint { opacity: .35; stroke-width: 1.3; }
.band { fill: var(--c); opacity: .13; }
.dot, .bar { fill: var(--c); } .mark { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
.guide { stroke-dasharray: 3 4; } .guide.warn { stroke: var(--warn); } .guide.act { stroke: var(--act); }
.note.warn { fill: var(--warn); } .note.act { fill: var(--act); }
.catch { fill: transparent; } .rule { stroke: var(--faint); opacity: 0; pointer-events: none; }
.h:hover .rule { opacity: .7; } .h:hover .bar { opacity: .75; } .h:hover .dot { stroke: var(--ink); }
.findings { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden;
  list-style: none; }
.findings li { display: grid; grid-template-columns: 74px minmax(0, 1fr); gap: 14px; padding: 11px 16px;
  border-top: 1px solid var(--grid); }
.findings li:first-child { border-top: 0; }
.level { justify-self: start; align-self: start; font-size: 12.5px; font-weight: 600; padding: 1px 9px;
  border-radius: 99px; margin-top: 1px; white-space: nowrap; }
.level.ok { color: var(--ok); background: var(--ok-tint); } .level.warn { color: var(--warn);
  background: var(--warn-tint); }
.level.act { color: var(--act); background: var(--act-tint); } .level.info { color: var(--info);
  background: var(--info-tint); }
.findings p { max-width: 96ch; overflow-wrap: anywhere; } .advice { color: var(--soft); }
.advice b { font-weight: 600; color: var(--ink); }
code, pre { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.metric { color: var(--faint); }
.pair { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; margin-top: 14px;
  overflow: hidden; }
.prompt { padding: 12px 16px; border-bottom: 1px solid var(--grid); }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
.side { padding: 12px 16px 13px; min-width: 0; display: flex; flex-direction: column;
  border-left: 1px solid var(--grid);
  margin-left: -1px; border-top: 1px solid var(--grid); margin-top: -1px; }
.who { font-size: 12.5px; color: var(--faint); display: flex; justify-content: space-between; gap: 12px;
  margin-bottom: 3px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; overflow: hidden; }
.text.empty { color: var(--faint); font-style: italic; }
.facts { display: flex; flex-wrap: wrap; gap: 1px 14px; font-size: 12.5px; color: var(--soft); margin-top: auto;
  padding-top: 9px;
  font-variant-numeric: tabular-nums; }
.facts b { font-weight: 600; color: var(--ink); } .facts span { overflow-wrap: anywhere; min-width: 0; }
.facts .up { color: var(--ok); } .facts .down { color: var(--act); }
details > summary { cursor: pointer; color: var(--soft); font-size: 13px; padding: 3px 0; }
details.block { margin-top: 14px; }
details.block > summary { font-size: 14px; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px;
  margin: 8px 0 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin-top: 8px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); } th:first-child, td:first-child { text-align: left;
  white-space: normal; overflow-wrap: anywhere; }
footer { margin-top: 52px; color: var(--faint); font-size: 13px; }
@media (max-width: 640px) { main { padding: 20px 14px 40px; }
.findings li { grid-template-columns: minmax(0, 1fr); gap: 5px; }
  h2 { margin-top: 40px; } .tile { flex-basis: 40%; padding: 11px 12px; }
.tile dd { font-size: 17px; } }
"""

SCRIPT = """
document.addEventListener("pointerover", event => {
  const place = event.target.closest && event.target.closest(".h");
  if (place) place.closest("figure").querySelector("output").textContent =
    place.querySelector("title").textContent.replaceAll("\\n", " · ");
});
"""
