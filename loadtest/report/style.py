"""The style sheet of the page, and its only script: a button for light and dark."""

from __future__ import annotations

from outrider.loadtest.report.palette import DARK, LIGHT, Palette, variables

_LIGHT_ONLY = {"--soft": "#f5f7f9", "--line": "#dfe3e8", "--link": "#0b5cad"}
_LIGHT_ONLY |= {"--good": "#0d7a4d", "--bad": "#b3361b", "--warn-soft": "#fff6e0"}
_DARK_ONLY = {"--soft": "#1b2129", "--line": "#333c48", "--link": "#7cbcff"}
_DARK_ONLY |= {"--good": "#5fd39c", "--bad": "#ff9077", "--warn-soft": "#33290f"}


def _rules(palette: Palette, more: dict[str, str], scheme: str) -> str:
    values = variables(palette) | more
    return "".join(f"{name}:{value};" for name, value in values.items()) + f"color-scheme:{scheme}"


def style_sheet() -> str:
    light, dark = _rules(LIGHT, _LIGHT_ONLY, "light"), _rules(DARK, _DARK_ONLY, "dark")
    return (
        f":root{{{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
        f"{_RULES}\n"
        f"@media print{{:root,:root[data-theme]{{{light}}}{_PRINT}}}\n"
    )


_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--ink);
 font:16px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}
.sheet{max-width:1140px;margin:0 auto;padding:32px 28px 64px}
header.top{display:flex;gap:16px;align-items:flex-start;justify-content:space-between}
.kind{margin:0 0 4px;color:var(--muted);font-size:14px}
h1{margin:0 0 20px;font-size:30px;line-height:1.25;letter-spacing:-.015em;font-weight:680;
 overflow-wrap:anywhere;text-wrap:balance}
h1.long{font-size:23px;line-height:1.35}
h2{margin:64px 0 12px;padding-top:20px;border-top:1px solid var(--line);font-size:22px;
 line-height:1.3;letter-spacing:-.01em;font-weight:650}
h3{margin:36px 0 6px;font-size:17px;line-height:1.35;font-weight:640;overflow-wrap:anywhere}
p{margin:8px 0 12px;max-width:76ch;overflow-wrap:anywhere}
.note{color:var(--muted);font-size:14.5px}
a{color:var(--link)}
button.theme{flex:none;font:inherit;font-size:14px;color:var(--ink);background:var(--soft);
 border:1px solid var(--line);border-radius:8px;padding:5px 12px;cursor:pointer}
:root:not(.has-script) button.theme{display:none}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin:22px 0 0;font-size:14.5px}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
ul.points{margin:12px 0;padding:0;list-style:none;max-width:82ch}
ul.points li{margin:6px 0;padding-left:18px;position:relative;overflow-wrap:anywhere}
ul.points li::before{content:"";position:absolute;left:2px;top:.68em;width:6px;height:6px;
 border-radius:50%;background:var(--muted)}
ul.finding{font-size:17.5px;line-height:1.55}
ul.caution{background:var(--warn-soft);border-radius:10px;padding:12px 18px}
dl{display:grid;grid-template-columns:minmax(110px,max-content) minmax(0,1fr);gap:6px 24px;
 margin:14px 0;font-size:15px}
dt{color:var(--muted);overflow-wrap:anywhere}
dd{margin:0;overflow-wrap:anywhere}
code{font:13.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace;
 background:var(--soft);border-radius:6px;padding:2px 6px;overflow-wrap:anywhere;
 -webkit-box-decoration-break:clone;box-decoration-break:clone}
.scroll{overflow-x:auto;margin:14px 0;max-width:100%}
table{border-collapse:separate;border-spacing:0;font-size:14px;line-height:1.4;font-variant-numeric:tabular-nums}
th,td{padding:6px 12px;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{color:var(--muted);font-weight:560;vertical-align:bottom;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
td:not(.n){min-width:100px;max-width:320px;overflow-wrap:anywhere}
.wide td:first-child{min-width:76px}
td.long{min-width:200px}
.wide td.long:first-child{min-width:150px}
th:first-child,td:first-child{padding-left:4px}
.wide td:first-child,.wide th:first-child{position:sticky;left:0;background:var(--page);
 max-width:150px}
.wide tr.first td{border-top:2px solid var(--line)}
td.better{color:var(--good);font-weight:600}
td.worse{color:var(--bad);font-weight:600}
.panels{display:grid;gap:20px 24px;margin:12px 0 4px;
 grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),1fr))}
.panels.few{grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),420px))}
.panels.long{grid-template-columns:minmax(0,1fr);overflow-x:auto}
.panels.long svg{min-width:820px}
.panels svg{display:block;width:100%;height:auto;overflow:visible}
.panels svg *{stroke-linejoin:round;stroke-linecap:butt}
.panels svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,
 sans-serif}
.key{display:flex;flex-wrap:wrap;gap:4px 22px;margin:8px 0 0;padding:0;list-style:none;
 font-size:14px}
.key li{display:flex;align-items:center;gap:8px;min-width:0;overflow-wrap:anywhere}
.key svg{flex:none;width:40px;height:14px}
details{margin:8px 0}
summary{cursor:pointer;color:var(--muted);font-size:14.5px;padding:3px 0;overflow-wrap:anywhere}
details.part>summary{color:var(--ink);font-weight:600;font-size:15.5px}
footer{margin-top:72px;padding-top:16px;border-top:1px solid var(--line);color:var(--muted);
 font-size:14px}
@media (max-width:640px){.sheet{padding:20px 16px 48px}
 header.top{display:block;position:relative}button.theme{position:absolute;top:0;right:0}
 .kind{padding-right:120px;margin-bottom:14px}
 h1{font-size:24px}h1.long{font-size:20px}
 h2{margin-top:44px}
 ul.finding{font-size:16.5px}dl{grid-template-columns:minmax(0,1fr);gap:0}dd{margin-bottom:8px}
 .wide td:first-child,.wide th:first-child{max-width:104px}}
"""
_PRINT = """
body{font-size:11pt}.sheet{max-width:none;padding:0}nav,button.theme{display:none!important}
details::details-content{content-visibility:visible;height:auto}
figure,table,.panels svg{break-inside:avoid}h2,h3{break-after:avoid}
.scroll{overflow:visible}table{font-size:8pt}th,td{padding:3px 5px}
"""
# The choice is not persisted: a local file has no storage of its own.
SCRIPT = """
(function(){var root=document.documentElement;root.classList.add("has-script");
document.querySelector("button.theme").addEventListener("click",function(){
var dark=root.dataset.theme?root.dataset.theme==="dark":
matchMedia("(prefers-color-scheme:dark)").matches;
root.dataset.theme=dark?"light":"dark"})})();
"""
