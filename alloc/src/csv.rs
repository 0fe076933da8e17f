//! Tables of buffers with MiniMalloc's columns: `id,lower,upper,size[,alignment][,offset]`.
//!
//! In: UTF-8 text with a header line; columns in any order, others ignored. Out: a [`Problem`] and the ids as written.
//! Every error names its line.

use std::collections::HashSet;
use std::io::{BufRead, Read, Write};

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

/// No line of a sound table is longer; one that is (a binary file, a missing line break) must not fill the memory.
const LONGEST_LINE: usize = 64 << 10;

/// Reads a table. The memory it takes grows with the buffers read, not with what a broken file promises.
///
/// # Errors
/// [`Error::Csv`] with the line: a missing column or field, a number that is negative, not a number or past `u64`,
/// `lower >= upper`, an alignment of 0, a repeated id, text that is not UTF-8, a line of more than 64 KiB.
pub fn read(input: impl BufRead) -> Result<Table, Error> {
    let mut lines = Lines { input, number: 0, bytes: Vec::new() };
    let columns = match lines.next()? {
        Some((line, header)) => columns(line, header)?,
        None => return Err(Error::Csv { line: 1, what: "empty file; expected the header id,lower,upper,size".into() }),
    };
    let (mut ids, mut buffers, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    let mut seen = Seen::default();
    while let Some((line, text)) = lines.next()? {
        let fields = Fields { line, text };
        let id = fields.text(columns.id, "id")?;
        let (lower, upper) = (fields.integer(columns.lower, "lower")?, fields.integer(columns.upper, "upper")?);
        if lower >= upper {
            return fields.fail(format!("lower {lower} is not below upper {upper}"));
        }
        let mut buffer = Buffer::new(lower..upper, fields.integer(columns.size, "size")?);
        if let Some(column) = columns.alignment {
            buffer.alignment = fields.integer(column, "alignment")?;
            if buffer.alignment == 0 {
                return fields.fail("alignment 0; the smallest alignment is 1".into());
            }
        }
        if let Some(column) = columns.offset {
            offsets.push(fields.integer(column, "offset")?);
        }
        if !seen.is_new(&ids, id) {
            return fields.fail(format!("id {} stands twice", shown(id)));
        }
        ids.push(id.to_owned());
        buffers.push(buffer);
    }
    Ok(Table { ids, problem: Problem::new(buffers)?, offsets: columns.offset.map(|_| offsets) })
}

/// Which ids there were. As long as each comes after the one before (`9`, `10`, `11`), nothing need be kept.
#[derive(Default)]
struct Seen {
    /// By a 128-bit hash, so that ten million ids need not be kept twice.
    hashes: Option<HashSet<u128>>,
}

impl Seen {
    /// Whether `id` is none of `ids`, all of which were asked for before in this order.
    fn is_new(&mut self, ids: &[String], id: &str) -> bool {
        let hash = |id: &str| {
            let hash = blake3::hash(id.as_bytes());
            u128::from_le_bytes(std::array::from_fn(|k| hash.as_bytes()[k]))
        };
        match &mut self.hashes {
            None if ids.last().is_none_or(|last| (last.len(), last.as_str()) < (id.len(), id)) => true,
            None => {
                let hashes = self.hashes.insert(ids.iter().map(|id| hash(id)).collect());
                hashes.insert(hash(id))
            }
            Some(hashes) => hashes.insert(hash(id)),
        }
    }
}

/// The fields of one line.
struct Fields<'l> {
    line: u64,
    text: &'l str,
}

impl<'l> Fields<'l> {
    fn fail<T>(&self, what: String) -> Result<T, Error> {
        Err(Error::Csv { line: self.line, what })
    }

    fn text(&self, column: usize, name: &str) -> Result<&'l str, Error> {
        match self.text.split(',').nth(column) {
            Some(field) => Ok(field.trim()),
            None => self.fail(format!("no value for column {name:?}")),
        }
    }

    fn integer(&self, column: usize, name: &str) -> Result<u64, Error> {
        let text = self.text(column, name)?;
        text.parse()
            .or_else(|e| self.fail(format!("{name} {} is not a whole number of 0 to 2^64 - 1: {e}", shown(text))))
    }
}

/// A piece of the input as a message shows it: quoted, and not too much of it.
fn shown(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((cut, _)) => format!("{:?}…", &text[..cut]),
        None => format!("{text:?}"),
    }
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

fn columns(line: u64, header: &str) -> Result<Columns, Error> {
    let names: Vec<&str> = header.trim_start_matches('\u{feff}').split(',').map(str::trim).collect();
    let find = |name: &str| names.iter().position(|n| n.eq_ignore_ascii_case(name));
    let need = |name: &str| {
        find(name).ok_or_else(|| Error::Csv {
            line,
            what: format!("no column {name:?} in the header {}; expected id,lower,upper,size", shown(header)),
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

/// The lines of a table that are not blank, with their numbers.
struct Lines<R> {
    input: R,
    number: u64,
    bytes: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    fn next(&mut self) -> Result<Option<(u64, &str)>, Error> {
        loop {
            self.bytes.clear();
            self.number += 1;
            let line = self.number;
            let mut limited = (&mut self.input).take(LONGEST_LINE as u64 + 1);
            if limited.read_until(b'\n', &mut self.bytes)? == 0 {
                return Ok(None);
            }
            if self.bytes.len() > LONGEST_LINE {
                return Err(Error::Csv { line, what: format!("longer than {LONGEST_LINE} bytes; is this a table?") });
            }
            if self.bytes.iter().any(|b| !b.is_ascii_whitespace()) {
                break;
            }
        }
        let line = self.number;
        let text = str::from_utf8(&self.bytes);
        let text = text.map_err(|e| Error::Csv { line, what: format!("not UTF-8 text: {e}") })?;
        Ok(Some((line, text.trim())))
    }
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
        check("a,0,1,4\nb,0,1,4\na,0,1,4\n", "line 4: id \"a\" stands twice");
        check("9,0,1,4\n10,0,1,4\n2,0,1,4\n\n10,0,1,4\n", "line 6: id \"10\" stands twice");
        check("a,1,1,4\n", "line 2: lower 1 is not below upper 1");
        check("a,2,1,4\n", "line 2: lower 2 is not below upper 1");
        check("a,-1,1,4\n", "line 2: lower \"-1\"");
        check("a,0,-1,4\n", "line 2: upper \"-1\"");
        check("a,0,1,-4\n", "line 2: size \"-4\"");
        check("a,0,18446744073709551616,4\n", "line 2: upper \"18446744073709551616\"");
        check("a,0,1,\n", "line 2: size \"\"");
        check("a,0,1,99999999999999999999\n", "line 2: size");
        check("a,0,1\n", "line 2: no value for column \"size\"");
        check("\n\na,0,1,1.5\n", "line 4: size \"1.5\"");
        check(&format!("a,0,1,{}\n", "9".repeat(100)), "line 2: size \"9999");
        check(&"x".repeat(1 << 20), "line 2: longer than 65536 bytes");
        check("a,0,1,18446744073709551615\nb,0,1,1\n", "18446744073709551616 bytes are alive at one tick");
    }

    #[test]
    fn reads_tables_as_people_write_them() {
        let check = |text: &[u8], expected: Result<usize, &str>| match (read(text), expected) {
            (Ok(table), Ok(buffers)) => assert_eq!(table.problem.len(), buffers),
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
            (result, expected) => panic!("{result:?} instead of {expected:?}"),
        };
        check(b"\xef\xbb\xbfID, Lower ,UPPER,size\r\na , 0,1, 4 \r\n\r\nb,1,2,4", Ok(2));
        check(b"size,upper,note,lower,id\n4,1,hello,0,a\n", Ok(1));
        check(b"id,lower,upper,size\n", Ok(0));
        check(b"", Err("line 1: empty file"));
        check(b"\n \n", Err("line 1: empty file"));
        check(b"id,lower,upper\n", Err("line 1: no column \"size\""));
        check(b"\xff\xfei\0d\0", Err("line 1: not UTF-8 text"));
        check(b"id,lower,upper,size\n\xff\xfe,0,1,4\n", Err("line 2: not UTF-8 text"));
        check(b"id,lower,upper,size\nz,7,9,4\ny,0,3,4\n2,1,8,4\n1,0,9,4\n", Ok(4));
        check(b"id,lower,upper,size,offset\na,0,1,4,-8\n", Err("line 2: offset \"-8\""));
        check(b"id,lower,upper,size,alignment\na,0,1,4,0\n", Err("line 2: alignment 0"));
    }

    proptest::proptest! {
        /// Whatever the bytes are, reading ends with a table or an error.
        #[test]
        fn reads_anything(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400), header: bool) {
            let mut text = if header { b"id,lower,upper,size,offset\n".to_vec() } else { Vec::new() };
            text.extend(&bytes);
            let _ = read(&text[..]);
        }

        /// And so it does when the bytes are nearly a table.
        #[test]
        fn reads_near_tables(rows in "([a-c0-9-]{1,2},[0-9-]{0,21},[0-9]{1,3},[0-9]{1,21}[\r\n,]{1,2}){0,20}") {
            let _ = read(format!("id,lower,upper,size\n{rows}").as_bytes());
        }
    }
}
