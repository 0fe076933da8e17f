use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::*;

/// The data that the page would draw, for the only run.
fn drawn(report: &Report) -> Value {
    let mut data: Value = serde_json::from_str(&report.data(false)).unwrap();
    data["runs"][0].take()
}

/// The points of a curve, decoded as the page does it.
fn points(run: &Value, name: &str) -> Vec<(u64, f32)> {
    let curve = &run["curves"][name];
    let steps: Vec<(u64, u64, u64)> = serde_json::from_value(curve["steps"].clone()).unwrap();
    let steps = steps.into_iter().flat_map(|(first, distance, count)| (0..count).map(move |n| first + n * distance));
    let values = STANDARD.decode(curve["values"].as_str().unwrap()).unwrap();
    let (values, rest) = values.as_chunks::<4>();
    assert!(rest.is_empty() && steps.clone().count() == values.len());
    steps.zip(values.iter().map(|&bytes| f32::from_le_bytes(bytes))).collect()
}

fn append(path: &Path, text: &str) {
    File::options().create(true).append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

/// Reads rows while they are written. The cases are a row that arrives in two halves, a row cut off by the end of a
/// process, repeated steps, a null value, and another run in the same folder.
#[test]
fn rows_are_read_as_they_come() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("metrics.jsonl");
    append(&metrics, "{\"step\":0,\"loss\":4.0,\"load\":[1,3]}\n{\"step\":1,\"loss\":3.0}\n{\"step\":2,\"lo");
    let mut report = Report::open(&[folder.path().to_owned()]).unwrap();
    assert_eq!(points(&drawn(&report), "loss"), [(0, 4.0), (1, 3.0)]);
    assert_eq!(points(&drawn(&report), "load.1"), [(0, 3.0)]);
    assert!(report.runs()[0].missing().iter().all(|missing| !missing.contains("line")));

    append(&metrics, "ss\":2.0}\n{\"step\":3,\"lo\n{\"step\":1,\"loss\":2.5}\n{\"step\":1,\"val_loss\":2.75}\n");
    append(&metrics, "{\"step\":2,\"loss\":null}\n\n{\"step\":5,\"loss\":1.0}\n{\"step\":9,\"loss\":0.5}");
    report.refresh().unwrap();
    let run = drawn(&report);
    let loss = points(&run, "loss");
    assert_eq!([&loss[..2], &loss[3..]].concat(), [(0, 4.0), (1, 2.5), (5, 1.0), (9, 0.5)]);
    assert!(loss[2].0 == 2 && loss[2].1.is_nan());
    assert_eq!(points(&run, "val_loss"), [(1, 2.75)]);
    assert!(report.runs()[0].missing().contains(&"1 line of its metrics is not a row".to_owned()));
    assert_eq!(report.runs()[0].steps(), Some(9));

    fs::write(&metrics, "{\"step\":0,\"loss\":7.0}\n{\"steps\":1,\"final_loss\":7.0}\n").unwrap();
    report.refresh().unwrap();
    let run = drawn(&report);
    assert_eq!(points(&run, "loss"), [(0, 7.0)]);
    assert_eq!(run["summary"]["final_loss"], json!(7.0));
}

#[test]
fn a_folder_has_what_it_has() {
    let place = tempfile::tempdir().unwrap();
    let [first, second, empty] = ["a/run", "b/run", "empty"].map(|name| place.path().join(name));
    [&first, &second, &empty].into_iter().for_each(|path| fs::create_dir_all(path).unwrap());
    fs::write(first.join("run.toml"), "steps = 4\n[step]\nbatch = 2\ndtype = \"f32\"\n").unwrap();
    fs::write(first.join("samples.txt"), "=== step 2\nold\n=== step 2\nto </script>\n=== what\n=== step 4\nbe\n")
        .unwrap();
    fs::write(second.join("rows.jsonl"), "{\"step\":0,\"loss\":1.0}\n").unwrap();
    for path in [&empty, &place.path().join("nowhere"), &first.join("run.toml")] {
        let error = Report::open(&[first.clone(), path.clone()]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{} is not the folder of a run", path.display())), "{error}");
    }

    let report = Report::open(&[first.clone(), second.clone()]).unwrap();
    let names: Vec<&str> = report.runs().iter().map(RunRecord::name).collect();
    assert_eq!(names, [first.to_str().unwrap(), second.to_str().unwrap()], "one last part of both");
    assert_eq!(report.runs()[0].missing(), ["no metrics.jsonl", "no summary.json", "no memory.html"]);
    let run = drawn(&report);
    assert_eq!(run["config"], json!({ "steps": "4", "step.batch": "2", "step.dtype": "f32" }));
    assert_eq!(run["samples"], json!([[2, "to </script>\n=== what\n"], [4, "be\n"]]));
    fs::write(first.join("memory.html"), "<!doctype html></script>").unwrap();
    fs::write(first.join("summary.json"), "{\"error\": \"the disk is full\"}").unwrap();
    let failed = Report::open(std::slice::from_ref(&first)).unwrap();
    assert!(failed.runs()[0].to_string().ends_with("no metrics.jsonl, failed: the disk is full"));
    let html = report.html().unwrap();
    assert_eq!(html.matches("</script>").count(), 3, "of the map, of the data, of the script");
}

/// The server returns the page, and rows that were written after the server was started. It refuses all other requests.
#[test]
fn a_served_report_follows_its_run() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("metrics.jsonl");
    append(&metrics, "{\"step\":0,\"loss\":4.0}\n");
    let server = Report::open(&[folder.path().to_owned()]).unwrap().listen(0).unwrap();
    let url = server.url();
    let host = url.strip_prefix("http://").and_then(|rest| rest.strip_suffix('/')).unwrap().to_owned();
    std::thread::spawn(move || server.run());
    let ask = |first: &str, named: &str| {
        let mut stream = TcpStream::connect(&host).unwrap();
        // The request is sent in two parts, as it may arrive over a network.
        write!(stream, "{first} HTTP/1.1\r\nAccept: */*\r\nHo").unwrap();
        write!(stream, "st: {named}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        (head[9..12].to_owned(), body.to_owned())
    };
    let (status, page) = ask("GET /", &host);
    assert!(status == "200" && page.contains("connect-src 'self'") && page.contains("\"is_served\":true"), "{status}");
    append(&metrics, "{\"step\":1,\"loss\":3.0}\n");
    let (status, data) = ask("GET /data.json", &host);
    let mut data: Value = serde_json::from_str(&data).unwrap();
    assert_eq!((status.as_str(), points(&data["runs"][0].take(), "loss")), ("200", vec![(0, 4.0), (1, 3.0)]));
    let refused = ["GET /metrics.jsonl", "GET /../metrics.jsonl", "GET /data.json?x", "POST /", "HEAD /", "GET"];
    for first in refused {
        assert_eq!(ask(first, &host).0, "404", "{first}");
    }
    assert_eq!(ask("GET /data.json", "rebound.example").0, "404", "another name for this address");
}

/// A pipe is reported as an error. It is not read, and the report does not wait for its data.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_not_read() {
    for name in ["run.toml", "metrics.jsonl", "summary.json", "samples.txt", "memory.html", "other.jsonl"] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("run.toml"), "steps = 4\n").unwrap();
        let pipe = folder.path().join(name);
        let _ = fs::remove_file(&pipe);
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let report = Report::open(&[folder.path().to_owned()]);
        let error = report.and_then(|report| report.html()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("not a regular file"), "{name}: {error}");
    }
}
