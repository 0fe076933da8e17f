//! Tests of `gapless report` under limits of the system.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

/// A server may only open a dozen files. It survives more connections than that, and responds once they are closed.
#[cfg(unix)]
#[test]
fn a_server_outlives_the_limit_of_open_files() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.toml"), "steps = 4\n").unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 12 && exec \"$0\" report \"$1\" --watch", env!("CARGO_BIN_EXE_gapless")]);
    let mut server = command.arg(folder.path()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let host = line.strip_prefix("http://").and_then(|rest| rest.split('/').next()).unwrap().to_owned();
    let silent: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(&host).unwrap()).collect();
    drop(silent);
    // While all connections are open, the server may have no file handle left with which to read the run.
    let mut asked = (0..1000).map(|_| {
        let (mut answer, mut stream) = (String::new(), TcpStream::connect(&host).unwrap());
        write!(stream, "GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
        let _ = stream.read_to_string(&mut answer);
        answer
    });
    let served = asked.any(|answer| answer.starts_with("HTTP/1.1 200 OK"));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(served);
}
