"""Style sheet of the sites, with colours for each site."""

from __future__ import annotations

ACCENTS = {
    "shop": ("#14532d", "#f4f7f4"),
    "forum": ("#5b3a8c", "#f6f4fa"),
    "calendar": ("#0b5394", "#f3f7fb"),
    "wiki": ("#7a4b12", "#faf7f2"),
    "forms": ("#8a1f3d", "#faf5f6"),
}

_SHEET = """
*{box-sizing:border-box}
body{margin:0;font:16px/1.45 "DejaVu Sans",Arial,sans-serif;color:#1d2329;background:GROUND;
  min-height:100vh;display:flex;flex-direction:column}
a{color:ACCENT;text-decoration:none}
a:hover{text-decoration:underline}
header{background:ACCENT;color:#fff;display:flex;flex-wrap:wrap;align-items:center;gap:6px 18px;padding:10px 24px}
header a{color:#fff}
.brand{font-weight:700;font-size:20px;white-space:nowrap}
header nav{display:flex;gap:16px;flex-wrap:wrap}
.search{display:flex;margin-left:auto}
.search input{width:200px;padding:6px 10px;border:0;border-radius:4px 0 0 4px;font:inherit;font-size:15px}
.search button{border-radius:0 4px 4px 0;background:#fff;color:ACCENT;padding:6px 12px;font-size:15px}
.who{display:flex;gap:12px;align-items:center;font-size:15px}
.plain{display:inline}
.plain button{background:transparent;border:1px solid currentColor;color:inherit;padding:4px 10px;font-size:14px}
main{width:100%;max-width:1120px;margin:0 auto;padding:18px 24px 28px;flex:1}
footer{text-align:center;color:#7b848c;font-size:14px;padding:10px 0 14px}
h1{font-size:25px;margin:4px 0 14px;line-height:1.25}
h2{font-size:19px;margin:20px 0 10px}
.sheet h2:first-child{margin-top:0}
p{margin:0 0 12px}
button,.button{font:inherit;background:ACCENT;color:#fff;border:0;border-radius:5px;padding:8px 18px;cursor:pointer;
  display:inline-block}
.quiet button{background:#fff;color:ACCENT;border:1px solid ACCENT;padding:5px 12px;font-size:14px}
.crumbs{color:#68727a;font-size:14px;margin-bottom:6px}
.notice{background:#fff6d9;border:1px solid #e6cf86;border-radius:5px;padding:9px 14px}
.sheet,.box{background:#fff;border:1px solid #dfe3e6;border-radius:8px;padding:18px 22px;margin:0 0 16px}
.narrow{max-width:430px}
.field{display:block;border:0;padding:0;margin:0 0 14px}
.field>span,legend{display:block;font-weight:600;margin-bottom:4px;padding:0}
.field input:not([type=radio]):not([type=checkbox]),textarea{width:100%;max-width:520px;font:inherit;padding:8px 10px;
  border:1px solid #b9c1c7;border-radius:5px;background:#fff}
.choice{display:inline-flex;align-items:center;gap:7px;padding:6px 12px;border:1px solid #d3d9dd;border-radius:5px;
  margin:0 8px 6px 0;background:#fff}
input[type=radio]{width:17px;height:17px;margin:0}
table{border-collapse:collapse;width:100%;background:#fff;border:1px solid #dfe3e6}
th,td{text-align:left;padding:9px 12px;border-bottom:1px solid #e8ebed;vertical-align:top}
th{background:#eef1f3;font-size:14px}
.pager{display:flex;flex-wrap:wrap;gap:6px;margin:16px 0}
.pager a,.pager b{padding:5px 12px;border:1px solid #cfd6da;border-radius:5px;background:#fff}
.pager b{background:ACCENT;color:#fff;border-color:ACCENT}
.tabs{display:flex;flex-wrap:wrap;gap:8px;margin:0 0 14px}
.tabs a,.tabs b{padding:5px 12px;border-radius:16px;background:#fff;border:1px solid #cfd6da;font-weight:400}
.tabs b{background:ACCENT;color:#fff}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(220px,1fr));gap:14px}
.card{background:#fff;border:1px solid #dfe3e6;border-radius:8px;padding:12px 14px;display:block}
.card svg{width:100%;height:96px;display:block;margin-bottom:8px;border-radius:5px}
.card a{font-weight:600}
.split .quiet{margin-top:10px}
.price{font-size:18px;font-weight:700}
.muted{color:#68727a;font-size:14px}
.split{display:grid;grid-template-columns:minmax(220px,400px) 1fr;gap:26px}
.split svg{width:100%;border-radius:8px}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:6px 18px;margin:0 0 14px}
.facts dt{color:#68727a}
.facts dd{margin:0}
.post{display:grid;grid-template-columns:130px 1fr;gap:14px;background:#fff;border:1px solid #dfe3e6;
  border-radius:8px;padding:12px 16px;margin-bottom:10px}
.post .foot{display:flex;gap:14px;align-items:center}
.week{display:grid;grid-template-columns:repeat(5,1fr);gap:10px}
.day{background:#fff;border:1px solid #dfe3e6;border-radius:8px;padding:10px;min-height:250px}
.day h2{font-size:15px;margin:0 0 8px}
.event{display:block;border-left:4px solid ACCENT;background:GROUND;padding:6px 8px;margin-bottom:8px;
  border-radius:3px;font-size:14px}
.event span{display:block;color:#68727a}
.infobox b{display:block;margin-bottom:8px}
.tools{display:flex;gap:16px;align-items:center;margin:0 0 14px}
.infobox{float:right;width:300px;margin:0 0 12px 22px}
.buttons{display:flex;flex-wrap:wrap;gap:12px;align-items:center;margin-top:14px}
.veil{position:fixed;inset:0;background:#10182099;display:flex;align-items:center;justify-content:center;z-index:9}
.dialog{background:#fff;border-radius:10px;padding:22px 28px;max-width:460px;margin:16px}
.dialog h2{margin-top:0}
.banner{position:fixed;left:0;right:0;bottom:0;background:#20272e;color:#fff;display:flex;gap:18px;flex-wrap:wrap;
  align-items:center;justify-content:center;padding:14px 24px;z-index:8}
.banner p{margin:0}
@media(max-width:760px){
  main{padding:12px 14px 20px}
  header{padding:8px 14px}
  .search input{width:130px}
  .week{grid-template-columns:1fr 1fr}
  .day{min-height:0}
  .split{grid-template-columns:1fr}
  .split svg{max-height:150px}
  .infobox{float:none;width:auto;margin:0 0 12px}
  .post{grid-template-columns:1fr;gap:4px}
  .grid{grid-template-columns:repeat(auto-fill,minmax(170px,1fr))}
}
"""


def stylesheet(site: str) -> str:
    accent, ground = ACCENTS[site]
    return _SHEET.replace("ACCENT", accent).replace("GROUND", ground)
