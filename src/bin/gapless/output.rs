//! What the program says: to whoever reads it, and in silence where nobody does any more (`gapless … | head`).

use std::fmt::{self, Display};
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde::Serialize;

/// Writes a result to the standard output. That its reader has left is no error: the exit code says what it would have.
pub fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to the standard output"),
    }
}

/// Bytes as people read them, and exactly.
pub struct Size(pub u64);

impl Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = self;
        match bytes >> 30 {
            0 => write!(f, "{:.1} MiB ({bytes} bytes)", *bytes as f64 / f64::from(1 << 20)),
            _ => write!(f, "{:.2} GiB ({bytes} bytes)", *bytes as f64 / f64::from(1 << 30)),
        }
    }
}

/// What several may be asked of as JSON: one answer as itself, others as a list.
pub fn to_json<T: Serialize>(answers: &[T]) -> serde_json::Result<String> {
    match answers {
        [one] => serde_json::to_string_pretty(one),
        all => serde_json::to_string_pretty(all),
    }
}

/// The end of a command that either does what is asked, or refuses it and says why.
pub fn exit_code(command: &str, done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell_error(&format!("gapless {command}"), &error);
            ExitCode::from(2)
        }
    }
}

/// Says something beside the result.
pub fn tell(what: impl Display) {
    // Nobody is left to be told of an error here.
    let _ = writeln!(io::stderr(), "{what}");
}

/// Says why a command ended: the error and its causes, each once. Some errors say their cause themselves.
pub fn tell_error(who: &str, error: &anyhow::Error) {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    tell(format_args!("{who}: {text}"));
}

/// A file that a picture is written to: its extension names the format, one of those.
pub fn picture(path: &str, formats: &[&str]) -> anyhow::Result<PathBuf> {
    let path = PathBuf::from(path);
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    if !formats.contains(&extension) {
        let formats: Vec<String> = formats.iter().map(|format| format!(".{format}")).collect();
        bail!("the extension must be one of {}", formats.join(", "));
    }
    Ok(path)
}

/// Writes a file beside the one that has its name, and renames it: a reader sees the old one or the new one, whole, and so does the
/// next run of a command that was killed. What is no file, like a pipe, is written to.
pub fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let write_to = |file: File| {
        let mut out = BufWriter::new(file);
        write(&mut out)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)
    };
    // The file that a link names, not the link.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let metadata = fs::metadata(&path).ok();
    if metadata.as_ref().is_some_and(|metadata| !metadata.is_file()) {
        return write_to(File::options().write(true).open(&path)?).map(drop);
    }
    let name = path.file_name().ok_or(ErrorKind::InvalidFilename)?.to_string_lossy();
    let beside = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let written = (|| {
        let file = write_to(File::create_new(&beside)?)?;
        if let Some(metadata) = metadata {
            file.set_permissions(metadata.permissions())?;
        }
        file.sync_all()?;
        fs::rename(&beside, &path)
    })();
    if written.is_err() {
        // The first error is told.
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_whole_stays_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.csv");
        fs::write(&path, "old").unwrap();
        let failed = replace(&path, |out| {
            out.write_all(&[b'x'; 100_000])?;
            Err(ErrorKind::StorageFull.into())
        });
        assert_eq!((failed.unwrap_err().kind(), fs::read(&path).unwrap()), (ErrorKind::StorageFull, b"old".to_vec()));
        let looked_at = replace(&path, |out| {
            out.write_all(&[b'x'; 100_000])?;
            assert_eq!(fs::read(&path)?, b"old");
            Ok(())
        });
        looked_at.unwrap();
        assert_eq!(fs::read(&path).unwrap(), [b'x'; 100_000]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    }
}
