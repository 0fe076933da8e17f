//! Outputs that cannot be written, and full disks.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use gapless_testing::not_checked;

use crate::{Checker, victim_command};

const STEPS: u64 = 3;

pub fn training_goes_on_unheard() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        return not_checked("there is no /dev/full");
    }
    let mut judge = Checker::new();
    let mut check = |stdout: Stdio, stderr: Stdio, rows: Option<&Path>, words: &str| {
        let dir = tempfile::tempdir().unwrap();
        if let Some(rows) = rows {
            symlink(rows, dir.path().join("rows.jsonl")).unwrap();
        }
        let mut child = victim_command(dir.path(), STEPS).stdout(stdout).stderr(stderr).spawn().unwrap();
        drop(child.stdout.take()); // a pipe without a reader
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(words), "{error}");
        assert_eq!(judge.resumes(dir.path()), STEPS);
    };
    let to_full = || Stdio::from(File::options().write(true).open(full).unwrap());
    check(Stdio::piped(), Stdio::piped(), None, "to the standard output (Broken pipe");
    check(to_full(), Stdio::piped(), None, "to the standard output (No space left");
    check(to_full(), to_full(), None, "");
    check(Stdio::null(), Stdio::piped(), Some(full), "rows.jsonl (No space left");
}

pub fn a_full_disk_loses_nothing() {
    // The victim gets a file system of its own, which is removed when the victim ends.
    let script = r#"mount -t tmpfs -o "size=$3k" none "$0" || exit 99
"$1" --victim "$0" 4; code=$?; cp -r "$0/." "$2"; exit $code"#;
    let mut judge = Checker::new();
    let mut codes = Vec::new();
    for kilobytes in [64, 128, 192, 4096] {
        let work = tempfile::tempdir().unwrap();
        let [disk, left] = ["disk", "left"].map(|name| work.path().join(name));
        [&disk, &left].into_iter().for_each(|path| fs::create_dir(path).unwrap());
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script]).arg(&disk);
        command.arg(std::env::current_exe().unwrap()).arg(&left).arg(kilobytes.to_string());
        let output = match command.output() {
            Ok(output) if output.status.code() != Some(99) && !output.stderr.starts_with(b"unshare") => output,
            other => return not_checked(format_args!("no small tmpfs can be mounted: {other:?}")),
        };
        let error = String::from_utf8_lossy(&output.stderr);
        let said = String::from_utf8_lossy(&output.stdout).lines().filter_map(|line| line.parse().ok()).max();
        let resumed = judge.resumes(&left);
        assert!(resumed >= said.unwrap_or(0), "{said:?} was saved, but {resumed} is left: {error}");
        assert!(output.status.success() || error.contains("check that the disk has room"), "{error}");
        codes.push(output.status.code());
    }
    assert_eq!((codes[0], codes[3]), (Some(1), Some(0)), "{codes:?}");
}

/// A write beyond the maximum file size fails like a write to a full disk. It does not end the process silently.
pub fn a_limit_of_file_sizes_loses_nothing() {
    let mut judge = Checker::new();
    let mut codes = Vec::new();
    for blocks in [8, 16, 4096] {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -f $0 && exec \"$@\"", &blocks.to_string()]);
        let output =
            command.arg(std::env::current_exe().unwrap()).arg("--victim").arg(dir.path()).arg("4").output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        let said = String::from_utf8_lossy(&output.stdout).lines().filter_map(|line| line.parse().ok()).max();
        let resumed = judge.resumes(dir.path());
        assert!(resumed >= said.unwrap_or(0), "{said:?} was saved, but {resumed} is left: {error}");
        assert!(output.status.success() || error.contains("File too large"), "{}: {error}", output.status);
        codes.push(output.status.code());
    }
    assert_eq!((codes[0], codes[2]), (Some(1), Some(0)), "{codes:?}");
}
