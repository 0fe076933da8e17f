//! Passes the commit that is built to the crate, as `GAPLESS_COMMIT`. It is empty if the sources are not a git checkout,
//! or if git is missing. Nothing else depends on git.

use std::process::Command;

fn main() {
    // A commit with changes ends with `-dirty`, so all sources of the command are watched.
    for path in ["src", "alloc", "engine", "models", "parallel"] {
        println!("cargo:rerun-if-changed={path}");
    }
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    let commit = git(&["describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]).unwrap_or_default();
    println!("cargo:rustc-env=GAPLESS_COMMIT={commit}");
}

/// Runs git in the folder of the package. Returns `None` if it fails.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
