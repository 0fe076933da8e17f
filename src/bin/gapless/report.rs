//! `gapless report RUN …`: the folders of runs as one page.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use gapless::run::Report;

use crate::output::{picture, print, replace, tell};

/// Make one page from the folders of runs: curves, configurations, samples, memory maps.
///
/// Runs in progress are shown up to their last step. Exit code: 1 if the page cannot be written or served, 2 if there is no run.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Folders of runs, as gapless train writes them
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The page to write
    #[arg(long, value_name = "FILE.html", default_value = "report.html", value_parser = |path: &str| picture(path, &["html"]))]
    out: PathBuf,
    /// Write the metrics for TensorBoard instead, into a folder in LOGDIR for each run (`tensorboard --logdir LOGDIR`)
    #[arg(long, value_name = "LOGDIR", conflicts_with_all = ["out", "watch"])]
    tensorboard: Option<PathBuf>,
    /// Serve the page on 127.0.0.1 instead and update it while runs are in progress, until Ctrl-C
    #[arg(long, conflicts_with = "out")]
    watch: bool,
    /// The port of --watch; 0 takes any that is free
    #[arg(long, value_name = "PORT", default_value_t = 0, requires = "watch")]
    port: u16,
}

/// Runs the command and reports errors.
pub fn run(arguments: &Arguments) -> ExitCode {
    let fail = |error: &dyn std::fmt::Display, code| {
        tell(format_args!("gapless report: {error}"));
        ExitCode::from(code)
    };
    let report = match Report::open(&arguments.runs) {
        Ok(report) => report,
        Err(error) => return fail(&error, 2),
    };
    report.runs().iter().for_each(tell);
    if let Some(folder) = &arguments.tensorboard {
        return match events(&report, folder) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&format_args!("{error:#}"), 1),
        };
    }
    if arguments.watch {
        return match watch(report, arguments.port) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&format_args!("cannot serve on port {}: {error}", arguments.port), 1),
        };
    }
    let page = match report.html() {
        Ok(page) => page,
        Err(error) => return fail(&error, 2),
    };
    if let Err(error) = replace(&arguments.out, |out| out.write_all(page.as_bytes())) {
        return fail(&format_args!("cannot write {}: {error}", arguments.out.display()), 1);
    }
    match print(|out| writeln!(out, "{}", arguments.out.display())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format_args!("{error:#}"), 1),
    }
}

/// Writes an event file for each run. A file that an earlier call has written is replaced.
fn events(report: &Report, folder: &Path) -> anyhow::Result<()> {
    for run in report.runs() {
        // The name is a whole path if the last components of several paths are equal.
        let name = run.name().trim_matches(|c| c == '/' || c == '.').replace(['/', '\\'], "-");
        let folder = folder.join(if name.is_empty() { "run" } else { &name });
        let file = folder.join("events.out.tfevents.0.gapless");
        let write = || {
            std::fs::create_dir_all(&folder)?;
            replace(&file, |out| out.write_all(&run.events()))
        };
        write().with_context(|| format!("cannot write {}", file.display()))?;
        print(|out| writeln!(out, "{}", file.display()))?;
    }
    Ok(())
}

fn watch(report: Report, port: u16) -> std::io::Result<()> {
    let server = report.listen(port)?;
    // An error is ignored, because browsers can connect even if the standard output is closed.
    let _ = print(|out| writeln!(out, "{} (stop with Ctrl-C)", server.url()));
    server.run()
}
