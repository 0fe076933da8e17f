//! The comparison as one page that needs nothing but itself.

use std::fmt::Write;

use serde_json::json;

use super::{Compared, Entry, gib};

/// Rows of a picture: the least that is drawn of a hole is one of them.
const ROWS: u64 = 260;

/// Draws the allocators side by side over time: what they reserve, what the program holds of it, and where the holes are.
/// Entries without a timeline are listed and not drawn.
pub fn page(compared: &Compared, title: &str) -> String {
    let title = escape(title);
    let mut rows = String::new();
    let mut figures = String::new();
    let mut pictures = Vec::new();
    let drawn = compared.allocators.iter().filter_map(|entry| entry.timeline.as_ref());
    let top = drawn.flat_map(|timeline| timeline.columns()).map(|column| column.reserved).max().unwrap_or(0).max(1);
    for Entry { kind, outcome, timeline, .. } in &compared.allocators {
        match outcome {
            Ok(report) => {
                let cells = format!(
                    "<tr><th>{kind}<td>{:.3}<td>{:.3}<td>{:.4}<td>{:.2} %<td>{}<td>{}",
                    gib(report.peak_reserved()),
                    gib(report.peak_allocated()),
                    report.peak_reserved() as f64 / compared.peak_live.max(1) as f64,
                    100.0 * report.fragmentation(),
                    report.statistics.segments,
                    report.statistics.device_calls()
                );
                rows += &cells;
            }
            Err(error) => {
                let _ = write!(rows, "<tr><th>{kind}<td colspan=6>{}", escape(&error.to_string()));
            }
        }
        let Some(timeline) = timeline else { continue };
        let summary = match outcome {
            Ok(report) => format!(
                "{:.3} GiB reserved, {:.2} % fragmented",
                gib(report.peak_reserved()),
                100.0 * report.fragmentation()
            ),
            Err(_) => "out of memory".to_owned(),
        };
        let _ = write!(
            figures,
            "<figure><figcaption><b>{kind}</b> {summary}</figcaption><canvas width={} height={ROWS}></canvas></figure>",
            timeline.columns().len().max(1)
        );
        let scale = |bytes: u64| (u128::from(bytes) * u128::from(ROWS)).div_ceil(u128::from(top)) as u64;
        let column = |column: &super::timeline::Column| {
            json!([scale(column.reserved), scale(column.allocated), in_rows(&column.layout, top)])
        };
        pictures.push(timeline.columns().iter().map(column).collect::<Vec<_>>());
    }
    let live = compared.peak_live as f64 / top as f64;
    let data = json!({ "rows": ROWS, "live": live, "pictures": pictures });
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\
         <title>{title}: allocators compared</title><style>{STYLE}</style>\
         <h1>{title}</h1>\
         <p>The same requests, served by each allocator; the step {} on a device of {:.0} GiB. At most {:.3} GiB are alive \
         at once.\
         <table><tr><th>allocator<th>reserved GiB<th>allocated GiB<th>÷ live<th>fragmentation<th>segments<th>device calls\
         {rows}</table>\
         <p class=key><i style=\"background:#2f6db5\"></i>held by the program <i style=\"background:#f3a6a0\"></i>hole: \
         reserved, not held <i class=line style=\"background:#b3261e\"></i>most reserved \
         <i class=line style=\"background:#0b2a4a\"></i>most allocated \
         <i class=line style=\"background:#111\"></i>most bytes alive at once, ever. Across: requests. Up: reserved memory from \
         the lowest address, segments on top of each other, to {:.3} GiB in every picture.\
         <main>{figures}</main><script>const data={data};{SCRIPT}</script></html>\n",
        if compared.iterations == 1 { "once".to_owned() } else { format!("{} times", compared.iterations) },
        gib(compared.capacity),
        gib(compared.peak_live),
        gib(top)
    )
}

/// Runs of bytes as runs of rows, rounded where they end; runs that vanish join their neighbours.
fn in_rows(layout: &[u64], top: u64) -> Vec<u64> {
    let mut rows: Vec<u64> = Vec::new();
    let (mut bytes, mut drawn) = (0u128, 0u64);
    for (index, &run) in layout.iter().enumerate() {
        bytes += u128::from(run);
        let end = ((bytes * u128::from(ROWS) + u128::from(top) / 2) / u128::from(top)) as u64;
        if end == drawn && index > 0 {
            continue;
        }
        let is_hole = index % 2 == 1;
        if (rows.len() % 2 == 1) == is_hole {
            rows.push(end - drawn);
        } else if let Some(last) = rows.last_mut() {
            *last += end - drawn;
        }
        drawn = end;
    }
    rows
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1120px;padding:0 1rem;color:#1a1a1a}\
h1{font-size:1.4rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums}\
td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd;font-weight:400}th:first-child{text-align:left}\
tr:first-child th{font-weight:600}main{display:grid;grid-template-columns:repeat(auto-fill,minmax(480px,1fr));gap:1.2rem}\
figure{margin:0}figcaption{margin-bottom:.2rem}canvas{width:100%;height:260px;background:#f7f7f5;border:1px solid #ddd;\
image-rendering:pixelated}.key i{display:inline-block;width:1em;height:1em;vertical-align:-.1em;margin:0 .3em 0 .8em}\
.key i.line{height:.15em;vertical-align:.3em}";

const SCRIPT: &str = "\
document.querySelectorAll('canvas').forEach((canvas,index)=>{\
const pen=canvas.getContext('2d'),up=y=>data.rows-y;\
let before=[0,0];\
data.pictures[index].forEach(([reserved,allocated,layout],x)=>{\
let y=0;layout.forEach((rows,run)=>{pen.fillStyle=run%2?'#f3a6a0':'#2f6db5';pen.fillRect(x,up(y+rows),1,rows);y+=rows});\
[[reserved,'#b3261e'],[allocated,'#0b2a4a']].forEach(([top,colour],line)=>{\
const from=Math.min(top,before[line]),to=Math.max(top,before[line]);\
pen.fillStyle=colour;pen.fillRect(x,up(to),1,Math.max(1,to-from));before[line]=top})});\
pen.fillStyle='#111';pen.fillRect(0,Math.floor(up(data.live*data.rows)),canvas.width,1)})";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_keep_their_places() {
        let check =
            |layout: &[u64], top: u64, expected: &[u64]| assert_eq!(in_rows(layout, top), expected, "{layout:?}");
        check(&[ROWS], ROWS, &[ROWS]);
        check(&[10, 20, 30], ROWS, &[10, 20, 30]);
        check(&[0, 20, 30], ROWS, &[0, 20, 30]);
        check(&[1000, 1, 1000], 1000 * ROWS, &[2]); // a hole too small to be drawn
        check(&[1000, 1, 1000, 2000], 1000 * ROWS, &[2, 2]);
    }
}
