//! A report on the loopback address, which follows its runs: two paths, and nothing of the file system by name.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::{Report, ReportError};

/// How long a client may take for its request, or for taking what it has asked for.
const PATIENCE: Duration = Duration::from_secs(10);

/// No request of a browser is longer, in bytes.
const LONGEST: usize = 16 << 10;

/// A report that is served on 127.0.0.1.
#[derive(Debug)]
pub struct ReportServer {
    listener: TcpListener,
    address: SocketAddr,
    report: Arc<Mutex<Report>>,
}

impl Report {
    /// Listens on 127.0.0.1 for browsers of this machine; port 0 is any that is free.
    ///
    /// # Errors
    /// A port that cannot be had.
    pub fn listen(self, port: u16) -> io::Result<ReportServer> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let address = listener.local_addr()?;
        Ok(ReportServer { listener, address, report: Arc::new(Mutex::new(self)) })
    }
}

impl ReportServer {
    /// Where a browser finds it.
    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// Answers until the process ends.
    ///
    /// # Errors
    /// A listener that is broken.
    pub fn run(&self) -> io::Result<()> {
        for stream in self.listener.incoming() {
            let stream = match stream {
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                stream => stream?,
            };
            let (report, address) = (self.report.clone(), self.address);
            // A browser opens connections before it needs them: each waits by itself. Who has left misses nothing.
            thread::spawn(move || drop(serve(&report, address, stream)));
        }
        Ok(())
    }
}

fn serve(report: &Mutex<Report>, address: SocketAddr, mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = head(&mut stream)?;
    let (status, kind, body) = match route(&request, address) {
        None => ("404 Not Found", "text/plain", "there is nothing here\n".to_owned()),
        Some(path) => match answer(&mut report.lock().unwrap_or_else(PoisonError::into_inner), path) {
            Ok(body) => ("200 OK", path.kind(), body),
            Err(error) => ("500 Internal Server Error", "text/plain", format!("{error}\n")),
        },
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {length}\r\nCache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n{body}"
    )
}

/// What there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Served {
    Page,
    Data,
}

impl Served {
    fn kind(self) -> &'static str {
        match self {
            Self::Page => "text/html",
            Self::Data => "application/json",
        }
    }
}

fn answer(report: &mut Report, path: Served) -> Result<String, ReportError> {
    report.refresh()?;
    match path {
        Served::Page => report.page(true),
        Served::Data => Ok(report.data(true)),
    }
}

/// What a request asks for. One that names another host is of a page that has given its own name to this address (DNS rebinding).
fn route(request: &str, address: SocketAddr) -> Option<Served> {
    let (first, headers) = request.split_once("\r\n")?;
    let mut hosts = headers.lines().filter_map(|line| line.split_once(':'));
    let host = hosts.find(|(name, _)| name.eq_ignore_ascii_case("host")).map(|(_, host)| host.trim())?;
    if host != address.to_string() && host != format!("localhost:{}", address.port()) {
        return None;
    }
    match first {
        "GET / HTTP/1.1" => Some(Served::Page),
        "GET /data.json HTTP/1.1" => Some(Served::Data),
        _ => None,
    }
}

/// The first line and the headers of a request.
fn head(stream: &mut impl Read) -> io::Result<String> {
    let (mut request, mut part) = (Vec::new(), [0; 1024]);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut part)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            _ if request.len() > LONGEST => return Err(ErrorKind::InvalidData.into()),
            bytes => request.extend(&part[..bytes]),
        }
    }
    String::from_utf8(request).map_err(|_| ErrorKind::InvalidData.into())
}
