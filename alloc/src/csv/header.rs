//! Finds the columns by the names that minimalloc's reader accepts (google/minimalloc, `src/converter.cc`).

use super::read::shown;
use crate::Error;

/// The position of each column in a line.
pub(super) struct Columns {
    /// Number of fields in a line.
    pub count: usize,
    pub id: usize,
    pub lower: usize,
    pub upper: usize,
    pub size: usize,
    pub alignment: Option<usize>,
    pub gaps: Option<usize>,
    pub hint: Option<usize>,
    pub offset: Option<usize>,
    /// Number to add to an end as written to get the tick after the last. It is 1 if the column is named `end`, since
    /// that column holds the last tick; otherwise 0.
    pub after_last: u64,
}

/// Every column name that is accepted, with this crate's name for that column.
const NAMES: [(&str, &str); 13] = [
    ("id", "id"),
    ("buffer", "id"),
    ("buffer_id", "id"),
    ("lower", "lower"),
    ("start", "lower"),
    ("begin", "lower"),
    ("upper", "upper"),
    ("end", "upper"),
    ("size", "size"),
    ("alignment", "alignment"),
    ("gaps", "gaps"),
    ("hint", "hint"),
    ("offset", "offset"),
];

pub(super) fn columns(line: u64, header: &str) -> Result<Columns, Error> {
    let written: Vec<String> =
        header.trim_start_matches('\u{feff}').split(',').map(|name| name.trim().to_ascii_lowercase()).collect();
    let meant =
        |name: &String| NAMES.iter().find(|(known, _)| known == name).map_or(name.clone(), |(_, m)| (*m).into());
    let names: Vec<String> = written.iter().map(meant).collect();
    let fail = |what| Error::Csv { line, what };
    for (k, name) in names.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
        if let Some(first) = names[..k].iter().position(|other| other == name) {
            let [first, second] = [first, k].map(|k| shown(&written[k]));
            return Err(fail(match first == second {
                true => format!("column {first} appears twice in the header"),
                false => format!("columns {first} and {second} of the header mean the same; leave one out"),
            }));
        }
    }
    let find = |name: &str| names.iter().position(|n| n == name);
    let need = |name: &str| {
        let what = || format!("no column {name:?} in the header {}; expected id,lower,upper,size", shown(header));
        find(name).ok_or_else(|| fail(what()))
    };
    let upper = need("upper")?;
    Ok(Columns {
        count: names.len(),
        id: need("id")?,
        lower: need("lower")?,
        upper,
        size: need("size")?,
        alignment: find("alignment"),
        gaps: find("gaps"),
        hint: find("hint"),
        offset: find("offset"),
        after_last: u64::from(written[upper] == "end"),
    })
}
