//! Output of the commands. A closed standard output, as in `gapless … | head`, is not an error.

use std::fmt::{self, Display};
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde::Serialize;

/// Writes a result to the standard output. A closed pipe is not an error, so the exit code still shows whether the
/// command itself succeeded.
pub fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to the standard output"),
    }
}

/// Formats bytes in MiB or GiB, with the exact number in parentheses.
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

/// Formats results as JSON. A single result becomes an object, and several become a list.
pub fn to_json<T: Serialize>(answers: &[T]) -> serde_json::Result<String> {
    match answers {
        [one] => serde_json::to_string_pretty(one),
        all => serde_json::to_string_pretty(all),
    }
}

/// Returns the exit code of a command, which is 0 on success. On an error, prints the error and returns 2.
pub fn exit_code(command: &str, done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell_error(&format!("gapless {command}"), &error);
            ExitCode::from(2)
        }
    }
}

/// Prints a message to the standard error.
pub fn tell(what: impl Display) {
    // An error is ignored, because there is no further output on which it could be reported.
    let _ = writeln!(io::stderr(), "{what}");
}

/// Prints the error that ended a command, followed by its causes. A cause is left out if the message before it already
/// ends with the same text.
pub fn tell_error(who: &str, error: &anyhow::Error) {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    tell(format_args!("{who}: {text}"));
}

/// Parses the path of a picture, whose extension must be one of `formats`.
pub fn picture(path: &str, formats: &[&str]) -> anyhow::Result<PathBuf> {
    let path = PathBuf::from(path);
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    if !formats.contains(&extension) {
        let formats: Vec<String> = formats.iter().map(|format| format!(".{format}")).collect();
        bail!("the extension must be one of {}", formats.join(", "));
    }
    Ok(path)
}

/// Replaces a file, by writing a temporary file next to it and renaming the temporary file. So readers see either the
/// whole old file or the whole new file, even if this command is killed. A pipe or device is written to directly.
pub fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let write_to = |file: File| {
        let mut out = BufWriter::new(file);
        write(&mut out)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)
    };
    // If the path is a link, the file that it points to is replaced, not the link.
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
        // An error of the removal is ignored, because the error that made it necessary is reported.
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
