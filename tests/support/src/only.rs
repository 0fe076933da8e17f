//! Test programs without the test harness. They are for tests that start themselves again, or that measure their own
//! process.

use std::panic::resume_unwind;
use std::thread;

/// The `main` of a program with a single test. Lists the test, or runs it, unless the filters of `cargo test` exclude
/// it.
pub fn only_test(name: &str, run: impl FnOnce() + Send + 'static) {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        println!("{name}: test");
    } else if is_chosen(name, &arguments) {
        // The test runs on a thread that has its name, as in the harness.
        let test = thread::Builder::new().name(name.to_owned()).spawn(run).expect("a thread starts");
        test.join().unwrap_or_else(|panic| resume_unwind(panic));
        println!("test {name} ... ok");
    }
}

/// True if the arguments, which are those of the harness, select the test.
fn is_chosen(name: &str, arguments: &[String]) -> bool {
    let (mut filters, mut skips, mut is_exact) = (Vec::new(), Vec::new(), false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--skip" => skips.extend(rest.next()),
            "--exact" => is_exact = true,
            // No test is ignored.
            "--ignored" => return false,
            "--test-threads" | "--format" | "--color" | "--logfile" | "-Z" => _ = rest.next(),
            option if option.starts_with('-') => {}
            _ => filters.push(argument),
        }
    }
    let meets = |filter: &&String| if is_exact { name == *filter } else { name.contains(filter.as_str()) };
    (filters.is_empty() || filters.iter().any(meets)) && !skips.iter().any(meets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_choose_as_the_harness_does() {
        for (line, expected) in [
            ("", true),
            ("--nocapture --test-threads 4", true),
            ("resi", true),
            ("other resi", true),
            ("other", false),
            ("generated:: --test-threads=1", false),
            ("--exact resi", false),
            ("resident --exact", true),
            ("--skip resi", false),
            ("--skip other resi", true),
            ("--ignored", false),
        ] {
            let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            assert_eq!(is_chosen("resident", &arguments), expected, "{line:?}");
        }
    }
}
