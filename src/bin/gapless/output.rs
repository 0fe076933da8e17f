//! What the program says: to whoever reads it, and in silence where nobody does any more (`gapless … | head`).

use std::fmt::Display;
use std::io::{self, BufWriter, ErrorKind, Write};

use anyhow::Context;

/// Writes a result to the standard output. That its reader has left is no error: the exit code says what it would have.
pub fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to the standard output"),
    }
}

/// Says something beside the result.
pub fn tell(what: impl Display) {
    // Nobody is left to be told of an error here.
    let _ = writeln!(io::stderr(), "{what}");
}
