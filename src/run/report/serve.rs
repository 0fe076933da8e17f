//! Serves a report on the loopback address and keeps the report up to date. The server answers two fixed paths and
//! never maps a request to a file.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Report, ReportError};

/// The maximum time for reading a whole request. The same maximum applies to writing the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The maximum size of a request in bytes; browsers send less.
const LONGEST: usize = 16 << 10;

/// The maximum number of simultaneous connections; a browser opens about six. Further connections get the answer 503.
const MAX_CONNECTIONS: usize = 64;

/// The pause after the system has refused a connection, for example because too many files are open.
const PAUSE: Duration = Duration::from_millis(100);

/// A report that is served on 127.0.0.1.
#[derive(Debug)]
pub struct ReportServer {
    listener: TcpListener,
    address: SocketAddr,
    report: Arc<Mutex<Report>>,
}

impl Report {
    /// Listens on 127.0.0.1, for browsers on this machine. Port 0 chooses any free port.
    ///
    /// # Errors
    /// Returns an error if the port is not available.
    pub fn listen(self, port: u16) -> io::Result<ReportServer> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let address = listener.local_addr()?;
        Ok(ReportServer { listener, address, report: Arc::new(Mutex::new(self)) })
    }
}

impl ReportServer {
    /// The address to open in a browser.
    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// Serves requests until the process ends. If the system refuses a connection, or a thread for it, only this
    /// connection ends.
    pub fn run(&self) -> ! {
        let open = Arc::new(AtomicUsize::new(0));
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => self.start(stream, &open),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }

    /// Serves a connection on its own thread, because browsers open connections before they need them. Errors of the
    /// connection, for example a client that disconnects, are ignored.
    fn start(&self, stream: TcpStream, open: &Arc<AtomicUsize>) {
        let place = ConnectionSlot::take(open);
        if open.load(Ordering::Relaxed) > MAX_CONNECTIONS {
            return refuse(stream);
        }
        let (report, address) = (self.report.clone(), self.address);
        let serve = move || {
            let _place = place;
            drop(serve(&report, address, stream));
        };
        // If no thread can be started, the connection is closed.
        drop(thread::Builder::new().name("report".into()).spawn(serve));
    }
}

/// Counts an open connection until it is dropped.
struct ConnectionSlot(Arc<AtomicUsize>);

impl ConnectionSlot {
    fn take(open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        Self(open.clone())
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers 503 without reading the request and without blocking.
fn refuse(mut stream: TcpStream) {
    if stream.set_nonblocking(true).is_ok() {
        let body = "the server is busy; try again\n";
        let _ = write!(
            stream,
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nRetry-After: 1\r\n\
             Connection: close\r\n\r\n{body}",
            body.len()
        );
    }
}

fn serve(report: &Mutex<Report>, address: SocketAddr, stream: TcpStream) -> io::Result<()> {
    let request = head(&mut Timed::new(&stream))?;
    let (status, kind, body) = match route(&request, address) {
        None => ("404 Not Found", "text/plain", "there is nothing here\n".to_owned()),
        Some(path) => match answer(&mut report.lock().unwrap_or_else(PoisonError::into_inner), path) {
            Ok(body) => ("200 OK", path.kind(), body),
            Err(error) => ("500 Internal Server Error", "text/plain", format!("{error}\n")),
        },
    };
    let length = body.len();
    write!(
        Timed::new(&stream),
        "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {length}\r\nCache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n{body}"
    )
}

/// A connection with a time limit: all reads together, and all writes together, must finish within [`PATIENCE`].
struct Timed<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl<'a> Timed<'a> {
    fn new(stream: &'a TcpStream) -> Self {
        Self { stream, until: Instant::now() + PATIENCE }
    }

    /// Returns the remaining time, or an error if no time remains.
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// The resources that are served.
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

/// Parses a request. Returns `None` if the path is not served, or if the request's host name is not this server's. Such
/// a request may come from a page of another site whose host name was pointed at this address (DNS rebinding).
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

/// Reads the request line and the headers of a request.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(stream: &mut TcpStream) -> String {
        let mut text = String::new();
        // A connection that is refused may be reset after the answer, so an error is ignored.
        let _ = stream.read_to_string(&mut text);
        text
    }

    /// Opens the maximum number of idle connections, and then one more, which is refused. After these connections are
    /// closed, another one is accepted.
    #[test]
    fn connections_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("run.toml"), "steps = 4\n").unwrap();
        let server = Report::open(&[folder.path().to_owned()]).unwrap().listen(0).unwrap();
        let address = server.address;
        thread::spawn(move || server.run());
        let connect = || TcpStream::connect(address).unwrap();
        let silent: Vec<TcpStream> = (0..MAX_CONNECTIONS).map(|_| connect()).collect();
        let refused = answer(&mut connect());
        assert!(refused.starts_with("HTTP/1.1 503 ") && refused.ends_with("try again\n"), "{refused}");
        drop(silent);
        let mut asked = (0..100_000).map(|_| {
            let mut stream = connect();
            let _ = write!(stream, "GET / HTTP/1.1\r\nHost: {address}\r\n\r\n");
            answer(&mut stream)
        });
        assert!(asked.any(|answer| answer.starts_with("HTTP/1.1 200 OK")));
    }

    /// The time limit covers all reads together: bytes that arrive one at a time do not extend it.
    #[test]
    fn a_request_has_an_end() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        client.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        let mut timed = Timed::new(&stream);
        timed.read_exact(&mut [0; 3]).unwrap();
        timed.until = Instant::now();
        assert_eq!(timed.read(&mut [0; 3]).unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(timed.write(b"x").unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(head(&mut timed).unwrap_err().kind(), ErrorKind::TimedOut);
    }
}
