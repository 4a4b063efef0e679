//! A rank's listener: accepts the connections of expected ranks after the handshake of [`hello`](super::hello).
//!
//! Other connections are refused with a reason, and counted in a list that the error contains if a rank is missing at the end; the
//! job continues. Unidentified connections are limited in number, in the time of the handshake, and in bytes.
//! One thread serves all of them; none can block another.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, SocketAddrV6, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use hmac::Mac;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use super::super::super::launcher::random;
use super::error::RefusedConnections;
use super::hello::{CODE, HEAD, HELLO, HELLO_LIMIT, JOB, JobKey, MAGIC, PROTOCOL, REASON, count, settle};

/// Maximum number of unidentified connections. When more come, the oldest is refused if it has had at least `FAIR`.
const GUESTS: usize = 256;
const FAIR: Duration = Duration::from_millis(200);
/// Longest time that a listener continues without file descriptors for new connections.
const STARVED: Duration = Duration::from_secs(5);

/// The ranks that a listener expects.
pub(super) struct Expected<'a> {
    /// The rank that listens.
    pub(super) at: usize,
    pub(super) world: usize,
    /// The ranks that may connect.
    pub(super) ranks: BTreeSet<usize>,
    pub(super) key: &'a JobKey,
}

/// The owner of a listener, which decides on admissions and receives the connections.
pub(super) trait Hall {
    /// Admits this rank, or returns the reason to refuse it. After an admission, [`Hall::arrive`] or [`Hall::leave`] follows.
    fn admit(&mut self, rank: usize) -> Result<(), String>;

    fn arrive(&mut self, rank: usize, stream: TcpStream);

    /// Handles an admitted rank that did not complete its handshake.
    fn leave(&mut self, _rank: usize) {}
}

/// Accepts each rank once.
impl Hall for BTreeMap<usize, TcpStream> {
    fn admit(&mut self, rank: usize) -> Result<(), String> {
        match self.get(&rank).is_some_and(|stream| !is_gone(stream)) {
            true => {
                Err(format!("its RANK is {rank}, and that rank has already connected; give each process its own RANK"))
            }
            false => Ok(()),
        }
    }

    fn arrive(&mut self, rank: usize, stream: TcpStream) {
        self.insert(rank, stream);
    }
}

/// The refused connections: each reason once, with their number.
#[derive(Default)]
struct Tally(Vec<RefusedConnections>);

impl Tally {
    /// Maximum number of distinct reasons; a stranger may cause many.
    const REASONS: usize = 16;

    fn add(&mut self, from: impl ToString, reason: &str) {
        let reason = match self.0.iter().any(|refused| refused.reason == reason) {
            false if self.0.len() >= Self::REASONS => "other reasons",
            _ => reason,
        };
        match self.0.iter_mut().find(|refused| refused.reason == reason) {
            Some(refused) => refused.count += 1,
            None => self.0.push(RefusedConnections { from: from.to_string(), reason: reason.to_string(), count: 1 }),
        }
    }
}

/// Progress of a connection's handshake.
enum Step {
    Hello,
    /// It must prove that it is this rank, with the random number that it was sent.
    Proof(usize, [u8; CODE]),
    /// It was admitted as this rank, and must acknowledge that.
    Heard(usize),
}

/// A nonblocking connection whose handshake is not complete.
struct Guest {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    said: Vec<u8>,
    step: Step,
}

/// Accepts the connections of the expected ranks, until all have connected or `until`. Also returns the refused connections.
///
/// # Errors
///
/// The system's error if it has no file descriptors for connections.
pub(super) fn receive(
    listener: &TcpListener,
    expected: &Expected<'_>,
    until: Instant,
) -> std::io::Result<(BTreeMap<usize, TcpStream>, Vec<RefusedConnections>)> {
    let (mut joined, mut door) = (BTreeMap::new(), Door::default());
    while Instant::now() < until {
        if joined.len() == expected.ranks.len() {
            // A rank whose connection has ended again does not count.
            joined.retain(|_, stream| !is_gone(stream));
            if joined.len() == expected.ranks.len() {
                break;
            }
        }
        if !door.turn(listener, expected, until, &mut joined)? {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok((joined, door.close(expected)))
}

/// The connections of a listener that are not complete, and those that were refused.
#[derive(Default)]
pub(super) struct Door {
    guests: Vec<Guest>,
    refused: Tally,
    starved: Option<Instant>,
}

impl Door {
    /// Accepts new connections, and continues the handshakes; returns `true` if there was anything to do.
    ///
    /// # Errors
    ///
    /// The system's error if it has had no file descriptors for a while.
    pub(super) fn turn(
        &mut self,
        listener: &TcpListener,
        expected: &Expected<'_>,
        until: Instant,
        hall: &mut impl Hall,
    ) -> std::io::Result<bool> {
        let Self { guests, refused, starved } = self;
        let mut is_idle = true;
        for _ in 0..GUESTS {
            if guests.len() >= GUESTS {
                let Some(at) = oldest(guests, FAIR) else { break };
                refused.add(guests.remove(at).from, "it had not stated its rank when other connections arrived");
            }
            match listener.accept() {
                Ok((stream, from)) => {
                    (is_idle, *starved) = (false, None);
                    // A blocking connection would block the others.
                    if stream.set_nonblocking(true).is_ok() {
                        guests.push(Guest { stream, from, since: Instant::now(), said: Vec::new(), step: Step::Hello });
                    }
                }
                Err(error) if is_short(&error) => {
                    if starved.get_or_insert_with(Instant::now).elapsed() > STARVED {
                        return Err(error);
                    }
                    if let Some(at) = oldest(guests, Duration::ZERO) {
                        refused.add(guests.remove(at).from, &format!("cannot accept it: {error}; raise `ulimit -n`"));
                    }
                    break;
                }
                // There is no connection, or it has ended again.
                Err(_) => break,
            }
        }
        let mut at = 0;
        while at < guests.len() {
            let welcomed: Vec<usize> = guests.iter().filter_map(Guest::welcomed).collect();
            let is_held = |rank: usize| welcomed.contains(&rank);
            match guests[at].turn(expected, until, hall, is_held) {
                Ok(None) => at += 1,
                Ok(Some(rank)) => {
                    is_idle = false;
                    let Guest { stream, .. } = guests.swap_remove(at);
                    match settle(&stream) {
                        Ok(()) => hall.arrive(rank, stream),
                        Err(_) => hall.leave(rank),
                    }
                }
                Err(reason) => {
                    is_idle = false;
                    let guest = guests.swap_remove(at);
                    if let Some(rank) = guest.welcomed() {
                        hall.leave(rank);
                    }
                    // A rank may have been slow because a machine was: without a refusal it tries again.
                    if guest.since.elapsed() <= HELLO_LIMIT {
                        guest.refuse(&reason);
                    }
                    refused.add(guest.from, &reason);
                }
            }
        }
        Ok(!is_idle)
    }

    /// Refuses the incomplete connections; returns and logs all that were refused.
    pub(super) fn close(mut self, expected: &Expected<'_>) -> Vec<RefusedConnections> {
        for guest in self.guests {
            self.refused.add(guest.from, "it had not stated its rank when the listener closed");
        }
        for RefusedConnections { from, reason, count } in &self.refused.0 {
            tracing::warn!(%from, %reason, count, "connections to rank {} were refused", expected.at);
        }
        self.refused.0
    }

    /// Returns `true` if there are incomplete connections.
    pub(super) fn has_guests(&self) -> bool {
        !self.guests.is_empty()
    }
}

/// Returns the index of the oldest connection that was not admitted, if it is at least `than` old.
fn oldest(guests: &[Guest], than: Duration) -> Option<usize> {
    let waiting = guests.iter().enumerate().filter(|(_, guest)| guest.welcomed().is_none());
    let (at, guest) = waiting.min_by_key(|(_, guest)| guest.since)?;
    (guest.since.elapsed() >= than).then_some(at)
}

/// Returns `true` if the system lacks the resources to accept a waiting connection.
fn is_short(error: &Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

impl Guest {
    /// Returns the rank that it was admitted as, if it was.
    fn welcomed(&self) -> Option<usize> {
        match self.step {
            Step::Heard(rank) => Some(rank),
            Step::Hello | Step::Proof(..) => None,
        }
    }

    /// Continues the handshake with the data received so far. Returns the rank once it is complete, or the reason of a refusal.
    fn turn(
        &mut self,
        expected: &Expected<'_>,
        until: Instant,
        hall: &mut impl Hall,
        is_held: impl Fn(usize) -> bool,
    ) -> Result<Option<usize>, String> {
        if self.since.elapsed() > HELLO_LIMIT {
            return Err(format!("it did not state its rank within {} s", HELLO_LIMIT.as_secs()));
        }
        if matches!(self.step, Step::Hello) {
            if !self.has(HEAD)? {
                return Ok(None);
            }
            let protocol = number(&self.said, 8);
            if protocol != PROTOCOL {
                return Err(format!(
                    "it speaks version {protocol} of the protocol, rank 0 version {PROTOCOL}; run the same build on \
                     all ranks"
                ));
            }
            if !self.has(HELLO)? {
                return Ok(None);
            }
            let rank = judge(&self.said, expected)?;
            let number = random().map_err(|error| format!("the system provides no random numbers: {error}"))?;
            self.say(&[&0_u32.to_le_bytes(), &number])?;
            self.step = Step::Proof(rank, number);
        }
        if let Step::Proof(rank, number) = self.step {
            if !self.has(HELLO + CODE)? {
                return Ok(None);
            }
            let (hello, code) = self.said.split_at(HELLO);
            let right = expected.key.code("rank", expected.at, hello, &number);
            // In constant time.
            if right.verify_slice(code).is_err() {
                return Err(match (expected.key.has_secret, expected.at) {
                    (true, 0) => "it does not know this job's secret; give all ranks the same ZERO_SECRET".to_string(),
                    _ => "it does not belong to this job".to_string(),
                });
            }
            // Another process is being admitted as this rank: wait for its outcome.
            if is_held(rank) {
                return Ok(None);
            }
            hall.admit(rank)?;
            self.step = Step::Heard(rank);
            let left = until.saturating_duration_since(Instant::now()).as_millis();
            let left = u32::try_from(left).unwrap_or(u32::MAX);
            let proof = expected.key.code("door", expected.at, hello, &number).finalize().into_bytes();
            self.say(&[&0_u32.to_le_bytes(), &left.to_le_bytes(), &proof])?;
        }
        let Step::Heard(rank) = self.step else {
            unreachable!("a guest that has said hello has been asked for a proof")
        };
        Ok(self.has(HELLO + CODE + 1)?.then_some(rank))
    }

    /// Reads up to a total of `length` bytes; returns `true` if all have arrived.
    fn has(&mut self, length: usize) -> Result<bool, String> {
        while self.said.len() < length {
            let mut room = [0; HELLO + CODE + 1];
            let ended = |why: String| Err(format!("it did not state its rank: {why}"));
            match self.stream.read(&mut room[..length - self.said.len()]) {
                Ok(0) => return ended("its connection ended".into()),
                Ok(more) => self.said.extend_from_slice(&room[..more]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return ended(error.to_string()),
            }
        }
        let magic = self.said.len().min(MAGIC.len());
        if self.said[..magic] != MAGIC[..magic] {
            return Err("it does not speak this protocol".into());
        }
        Ok(self.said.len() >= length)
    }

    /// Sends bytes in one write: these few fit the send buffer of a connection that has sent little else.
    fn say(&self, parts: &[&[u8]]) -> Result<(), String> {
        let bytes = parts.concat();
        count(bytes.len());
        match (&self.stream).write(&bytes) {
            Ok(all) if all == bytes.len() => Ok(()),
            Ok(_) => Err("it accepts no reply".into()),
            Err(error) => Err(format!("it accepts no reply: {error}")),
        }
    }

    fn refuse(&self, reason: &str) {
        // It may have ended already. Unread bytes are read first: closing with unread bytes may discard the reason.
        let _ = (&self.stream).read(&mut [0; REASON]);
        let _ = self.say(&[&(reason.len() as u32).to_le_bytes(), reason.as_bytes()]);
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// Returns the rank of a hello, if it is expected.
fn judge(hello: &[u8], expected: &Expected<'_>) -> Result<usize, String> {
    let Expected { world, ranks, key, .. } = expected;
    let (of, rank, has_secret) = (number(hello, HEAD), number(hello, HEAD + 4), hello[HEAD + 8] != 0);
    let job = &hello[HEAD + 9..][..JOB];
    if of as usize != *world {
        return Err(format!("its WORLD_SIZE is {of}, rank 0's is {world}; give all ranks the same"));
    }
    if job != key.job {
        let name = |job: &[u8]| String::from_utf8_lossy(job).trim_end_matches('\0').escape_debug().to_string();
        return Err(format!("it belongs to another job, '{}', not to '{}'", name(job), name(&key.job)));
    }
    match (has_secret, key.has_secret) {
        (false, true) => return Err("it has no ZERO_SECRET, and rank 0 has one; give all ranks the same".into()),
        (true, false) => return Err("it has a ZERO_SECRET, and rank 0 has none; give all ranks the same".into()),
        _ => {}
    }
    match ranks.contains(&(rank as usize)) {
        true => Ok(rank as usize),
        false => {
            let (first, last) = (ranks.first().unwrap_or(&0), ranks.last().unwrap_or(&0));
            Err(format!("its RANK is {rank}, expected one from {first} to {last}"))
        }
    }
}

/// Returns `true` if the other end has closed the connection. Consumes no data.
fn is_gone(stream: &TcpStream) -> bool {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let restored = stream.set_nonblocking(false);
    restored.is_err() || !matches!(looked, Ok(1..)) && !looked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Listens at the given address. Listens on all addresses instead if it is a name that is not an address of this machine (a
/// Kubernetes service), or if the machine resolves its own name to its loopback address, as Debian's do.
pub(super) fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let resolved: Vec<SocketAddr> = (host, port).to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    let meant = host == "localhost" || host.parse::<IpAddr>().is_ok();
    let mut failed = None;
    for address in resolved.iter().filter(|address| meant || !address.ip().is_loopback()) {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => failed = Some(error),
            Err(_) => {}
        }
    }
    match failed {
        Some(error) => Err(error),
        None => bind_all(port),
    }
}

/// Listens on all addresses of this machine, also on IPv4 if the system separates the two (`net.ipv6.bindv6only`).
pub(super) fn bind_all(port: u16) -> std::io::Result<TcpListener> {
    bind_both(port).or_else(|_| TcpListener::bind((IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)))
}

fn bind_both(port: u16) -> std::io::Result<TcpListener> {
    const WAITING: i32 = 128;
    let socket = net::socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    net::sockopt::set_ipv6_v6only(&socket, false)?;
    // As the standard library does.
    net::sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0))?;
    net::listen(&socket, WAITING)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::super::super::super::launcher::Rendezvous;
    use super::super::hello::knock;
    use super::*;

    #[test]
    fn a_listener_on_all_addresses_takes_both_families() {
        let listener = bind_all(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect(("127.0.0.1", port)).unwrap();
        if listener.local_addr().unwrap().is_ipv6() {
            assert!(!net::sockopt::ipv6_v6only(&listener).unwrap());
        }
    }

    /// A delayed listener finds the stale connection of a rank that has given up meanwhile and will connect again.
    #[test]
    fn a_connection_that_has_gone_is_not_taken_for_its_rank() {
        let listener = bind("127.0.0.1", 0).unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let key = JobKey::of(&Rendezvous::default());
        let mut stale = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut hello = MAGIC.to_vec();
        for number in [PROTOCOL, 2, 1] {
            hello.extend_from_slice(&number.to_le_bytes());
        }
        hello.resize(HELLO, 0);
        stale.write_all(&hello).unwrap();
        drop(stale);
        let until = Instant::now() + Duration::from_secs(5);
        std::thread::scope(|scope| {
            let live = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                knock(("127.0.0.1", port), 0, (1, 2), &key, until).unwrap().0
            });
            let (joined, refused) =
                receive(&listener, &Expected { at: 0, world: 2, ranks: (1..2).collect(), key: &key }, until).unwrap();
            let live = live.join().unwrap();
            assert_eq!(joined[&1].peer_addr().unwrap(), live.local_addr().unwrap());
            assert!(refused.len() == 1 && refused[0].reason.contains("did not state its rank"), "{refused:?}");
        });
    }

    /// A rank whose connection ends before the last rank connects does not count.
    #[test]
    fn all_are_there_when_the_door_closes() {
        let listener = bind("127.0.0.1", 0).unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let key = JobKey::of(&Rendezvous::default());
        let until = Instant::now() + Duration::from_secs(5);
        let come = |rank| knock(("127.0.0.1", port), 0, (rank, 3), &key, until).unwrap().0;
        std::thread::scope(|scope| {
            let ranks = scope.spawn(|| {
                drop(come(1));
                let two = come(2);
                std::thread::sleep(Duration::from_millis(200));
                (come(1), two)
            });
            let (joined, _) =
                receive(&listener, &Expected { at: 0, world: 3, ranks: (1..3).collect(), key: &key }, until).unwrap();
            let (one, two) = ranks.join().unwrap();
            for (rank, stream) in [(1, one), (2, two)] {
                assert_eq!(joined[&rank].peer_addr().unwrap(), stream.local_addr().unwrap());
            }
        });
    }

    /// A slow trickle of bytes does not keep a connection.
    #[test]
    fn a_hello_has_one_deadline() {
        let listener = bind("127.0.0.1", 0).unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let key = JobKey::of(&Rendezvous::default());
        let until = Instant::now() + Duration::from_secs(8);
        std::thread::scope(|scope| {
            let slow = scope.spawn(move || {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                for byte in MAGIC.into_iter().chain([0; HELLO]) {
                    std::thread::sleep(Duration::from_millis(900));
                    // Two writes after its end the system says so.
                    if stream.write_all(&[byte]).is_err() {
                        break;
                    }
                }
                stream.read(&mut [0; 16])
            });
            let (_, refused) =
                receive(&listener, &Expected { at: 0, world: 2, ranks: (1..2).collect(), key: &key }, until).unwrap();
            assert!(refused[0].reason.contains("within 5 s"), "{refused:?}");
            // It is not told to go away: a rank would try again.
            assert!(!matches!(slow.join().unwrap(), Ok(1..)));
        });
    }
}
