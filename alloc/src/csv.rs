//! Tables of buffers with MiniMalloc's columns: `id,lower,upper,size[,alignment][,offset]`.
//!
//! In: UTF-8 text with a header line; columns in any order, others ignored. Out: a [`Problem`] and the ids as written.
//! Every error names its line.

use std::collections::HashSet;
use std::io::{BufRead, Write};

use crate::{Buffer, Error, Problem};

/// A problem with the ids its file gave to the buffers.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// Ids as written, indexed by [`BufferId`](crate::BufferId).
    pub ids: Vec<String>,
    /// The buffers.
    pub problem: Problem,
    /// The `offset` column, where there is one: a plan that the file carries, not a pin.
    pub offsets: Option<Vec<u64>>,
}

/// Reads a table.
///
/// # Errors
/// [`Error::Csv`] with the line: a missing column or field, a number that is negative, not a number or past `u64`,
/// `lower >= upper`, a repeated id, text that is not UTF-8.
pub fn read(mut input: impl BufRead) -> Result<Table, Error> {
    let mut line = String::new();
    let mut number = 0u64;
    let Some(columns) = next_line(&mut input, &mut line, &mut number)?.map(columns).transpose()? else {
        return Err(Error::Csv { line: 1, what: "empty file; expected the header id,lower,upper,size".into() });
    };
    let (mut ids, mut buffers, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    while let Some((at, text)) = next_line(&mut input, &mut line, &mut number)? {
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        let fail = |what: String| Error::Csv { line: at, what };
        let field = |column: usize, name: &str| {
            fields.get(column).copied().ok_or_else(|| fail(format!("no value for column {name:?}")))
        };
        let integer = |column: usize, name: &str| {
            let text = field(column, name)?;
            text.parse::<u64>().map_err(|e| fail(format!("{name} {text:?} is not a whole number of at least 0: {e}")))
        };
        let id = field(columns.id, "id")?;
        if !seen.insert(id.to_owned()) {
            return Err(fail(format!("id {id:?} stands twice")));
        }
        let (lower, upper) = (integer(columns.lower, "lower")?, integer(columns.upper, "upper")?);
        if lower >= upper {
            return Err(fail(format!("lower {lower} is not below upper {upper}")));
        }
        let mut buffer = Buffer::new(lower..upper, integer(columns.size, "size")?);
        if let Some(column) = columns.alignment {
            buffer.alignment = integer(column, "alignment")?;
            if buffer.alignment == 0 {
                return Err(fail("alignment 0; the smallest is 1".into()));
            }
        }
        if let Some(column) = columns.offset {
            offsets.push(integer(column, "offset")?);
        }
        ids.push(id.to_owned());
        buffers.push(buffer);
    }
    Ok(Table { ids, problem: Problem::new(buffers)?, offsets: columns.offset.map(|_| offsets) })
}

/// Writes a table, with the `offset` column when `offsets` are given.
///
/// # Errors
/// Only what the writer returns.
pub fn write(mut out: impl Write, ids: &[String], problem: &Problem, offsets: Option<&[u64]>) -> Result<(), Error> {
    let aligned = problem.buffers().iter().any(|b| b.alignment != 1);
    write!(out, "id,lower,upper,size")?;
    write!(out, "{}", if aligned { ",alignment" } else { "" })?;
    writeln!(out, "{}", if offsets.is_some() { ",offset" } else { "" })?;
    for (index, (id, b)) in ids.iter().zip(problem.buffers()).enumerate() {
        write!(out, "{id},{},{},{}", b.lifetime.start, b.lifetime.end, b.bytes)?;
        if aligned {
            write!(out, ",{}", b.alignment)?;
        }
        if let Some(offsets) = offsets {
            write!(out, ",{}", offsets[index])?;
        }
        writeln!(out)?;
    }
    Ok(())
}

struct Columns {
    id: usize,
    lower: usize,
    upper: usize,
    size: usize,
    alignment: Option<usize>,
    offset: Option<usize>,
}

fn columns((line, header): (u64, &str)) -> Result<Columns, Error> {
    let names: Vec<&str> = header.trim_start_matches('\u{feff}').split(',').map(str::trim).collect();
    let find = |name: &str| names.iter().position(|n| n.eq_ignore_ascii_case(name));
    let need = |name: &str| {
        find(name).ok_or_else(|| Error::Csv {
            line,
            what: format!("no column {name:?} in the header {header:?}; expected id,lower,upper,size"),
        })
    };
    Ok(Columns {
        id: need("id")?,
        lower: need("lower")?,
        upper: need("upper")?,
        size: need("size")?,
        alignment: find("alignment"),
        offset: find("offset"),
    })
}

/// The next line that is not blank, with its number.
fn next_line<'l>(
    input: &mut impl BufRead,
    line: &'l mut String,
    number: &mut u64,
) -> Result<Option<(u64, &'l str)>, Error> {
    loop {
        line.clear();
        *number += 1;
        let at = *number;
        let read = input.read_line(line).map_err(|e| match e.kind() {
            std::io::ErrorKind::InvalidData => Error::Csv { line: at, what: "not UTF-8 text".into() },
            _ => Error::Io(e),
        })?;
        if read == 0 {
            return Ok(None);
        }
        if !line.trim().is_empty() {
            break;
        }
    }
    Ok(Some((*number, line.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_wrote() {
        let text = "id,lower,upper,size,alignment,offset\nb1,0,3,4,4,0\nb2,3,9,4,1,8\n";
        let table = read(text.as_bytes()).unwrap();
        let mut out = Vec::new();
        write(&mut out, &table.ids, &table.problem, table.offsets.as_deref()).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), text);
    }

    #[test]
    fn names_the_line_of_an_error() {
        let check = |rows: &str, expected: &str| {
            let error = read(format!("id,lower,upper,size\n{rows}").as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check("a,0,1,4\na,1,2,4\n", "line 3: id \"a\" stands twice");
        check("a,1,1,4\n", "line 2: lower 1 is not below upper 1");
        check("a,-1,1,4\n", "line 2: lower \"-1\"");
        check("a,0,1,99999999999999999999\n", "line 2: size");
        check("a,0,1\n", "line 2: no value for column \"size\"");
    }
}
