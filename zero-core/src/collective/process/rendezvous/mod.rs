//! How the ranks of a job find each other, and connect each with each.
//!
//! 1. Rank 0 listens at `MASTER_ADDR`:`MASTER_PORT`; the others connect to it, say which rank of which job they are, and prove
//!    that they know its secret, as rank 0 proves it to them ([`hello`]).
//! 2. Each tells rank 0 its machine and the port of a listener of its own. When all have, rank 0 sends everyone the table of
//!    them, with a token that stands for having come so far.
//! 3. Each connects to the ranks between rank 0 and itself, and takes the connections of those above it.
//! 4. Each reports to rank 0, which says go, or why not.
//!
//! Trouble anywhere ends the rendezvous of all ranks with its reason. Ranks listen only until all have connected, and only at the
//! address at which the others reach them. A job without a secret is for one machine, or for a network that is said to have
//! nobody else on it. What is not meant: encryption. Who can listen in on the network, or change what goes over it, sees and
//! changes parameters.

mod door;
mod error;
mod hello;

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use door::Expected;
pub use error::{Refused, RendezvousError};
use hello::{JobKey, Token, Turned};

use super::super::launcher::{Place, Rendezvous, random};
use super::super::machine::Machine;

/// What ranks that have all found rank 0 have at least left for the rest.
const REST: Duration = Duration::from_secs(5);
/// How much longer than rank 0 the others wait for what it says, so that its own error comes first.
const LONGER: Duration = Duration::from_secs(1);
/// The longest message of a rendezvous: a table of many thousand ranks.
const LONGEST: usize = 16 << 20;

/// A rank's connections to all the others, and its place among them.
pub(super) struct Mesh {
    /// By rank; none to itself.
    pub(super) streams: Vec<Option<TcpStream>>,
    pub(super) place: Place,
    /// Who was turned away from this rank's door.
    pub(super) refused: Vec<Refused>,
}

/// What a rank tells of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Seat {
    machine: Machine,
    /// What its environment says.
    local_rank: Option<usize>,
    /// Where it listens; rank 0 fills in the address, as it sees it.
    address: Option<IpAddr>,
    port: u16,
}

/// What rank 0 tells the others.
#[derive(Debug, Serialize, Deserialize)]
enum Word {
    Table {
        token: Token,
        seats: Vec<Seat>,
    },
    Go,
    /// The rendezvous has failed.
    Stop(String),
}

impl Mesh {
    /// The only rank.
    pub(super) fn alone() -> Self {
        Self { streams: vec![None], place: Place::from_leaders(0, &[0]), refused: Vec::new() }
    }

    fn new(
        rank: usize,
        (streams, refused): (BTreeMap<usize, TcpStream>, Vec<Refused>),
        seats: &[Seat],
        node_size: Option<usize>,
    ) -> Self {
        let leader = |of: usize| match node_size {
            Some(ranks) => of - of % ranks.max(1),
            None => seats.iter().position(|seat| seat.machine.id == seats[of].machine.id).unwrap_or(of),
        };
        let leaders: Vec<usize> = (0..seats.len()).map(leader).collect();
        let mut place = Place::from_leaders(rank, &leaders);
        if let (None, Some(local_rank)) = (node_size, seats[rank].local_rank) {
            place.local_rank = local_rank;
        }
        let mut all: Vec<Option<TcpStream>> = seats.iter().map(|_| None).collect();
        for (peer, stream) in streams {
            all[peer] = Some(stream);
        }
        Self { streams: all, place, refused }
    }
}

/// Connects this process with the other ranks of its job. A collective: every process calls it, once.
pub(super) fn connect(
    job: &Rendezvous,
    deadline: Duration,
    node_size: Option<usize>,
    trusted_network: bool,
) -> Result<Mesh, RendezvousError> {
    let begin = Instant::now();
    if job.world > 1 && job.secret.is_none() && !job.is_local() && !job.trusted_network && !trusted_network {
        return Err(RendezvousError::Untrusted { rank: job.rank, host: job.host.clone() });
    }
    match (job.world, job.rank) {
        (1, _) => Ok(Mesh::alone()),
        (_, 0) => lead(job, begin, deadline, node_size),
        _ => follow(job, begin, deadline, node_size),
    }
}

/// Rank 0's part.
fn lead(
    job: &Rendezvous,
    begin: Instant,
    deadline: Duration,
    node_size: Option<usize>,
) -> Result<Mesh, RendezvousError> {
    let Rendezvous { world, host, port, .. } = job;
    let failed = |source| RendezvousError::Listen { host: host.clone(), port: *port, source };
    let listener = door::bind(host, *port).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let key = JobKey::of(job);
    let expected = Expected { at: 0, world: *world, ranks: 1..*world, key: &key };
    let received = door::receive(&listener, &expected, begin + deadline);
    let (mut streams, refused) = received.map_err(|source| RendezvousError::System { rank: 0, source })?;
    drop(listener);
    let missing: Vec<usize> = (1..*world).filter(|rank| !streams.contains_key(rank)).collect();
    if !missing.is_empty() {
        for stream in streams.values() {
            // They have been welcomed: what comes next is the end.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let waited_ms = begin.elapsed().as_millis() as u64;
        return Err(RendezvousError::Missing { host: host.clone(), port: *port, waited_ms, missing, refused });
    }
    let settled = settle(job, &mut streams, (begin + deadline).max(Instant::now() + REST));
    let seats = settled.inspect_err(|error| tell(&mut streams, &Word::Stop(error.to_string())))?;
    tell(&mut streams, &Word::Go);
    Ok(Mesh::new(0, (streams, refused), &seats, node_size))
}

/// All ranks have found rank 0: lets them connect with one another.
fn settle(
    job: &Rendezvous,
    streams: &mut BTreeMap<usize, TcpStream>,
    until: Instant,
) -> Result<Vec<Seat>, RendezvousError> {
    let mesh = |reason: String| RendezvousError::Mesh { rank: 0, reason };
    let lost = |rank: usize, error: Error| format!("rank {rank} was lost while the ranks connected ({error})");
    let mut seats = vec![Seat { machine: Machine::here(), local_rank: job.local_rank, address: None, port: job.port }];
    for (&rank, stream) in &mut *streams {
        let mut seat: Seat = hear(stream, until).map_err(|error| mesh(lost(rank, error)))?;
        seat.address = stream.peer_addr().ok().map(|address| address.ip().to_canonical());
        seats.push(seat);
    }
    compare(&seats)?;
    let token: Token = random().map_err(|source| RendezvousError::System { rank: 0, source })?;
    tell(streams, &Word::Table { token, seats: seats.clone() });
    let mut reasons = Vec::new();
    for (&rank, stream) in &mut *streams {
        match hear::<Result<(), String>>(stream, until + LONGER) {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => reasons.push(reason),
            Err(error) => reasons.push(lost(rank, error)),
        }
    }
    if reasons.is_empty() { Ok(seats) } else { Err(mesh(reasons.join("; "))) }
}

/// Two processes of one host that say that they are the same one of it. Containers of one machine count on their own.
fn compare(seats: &[Seat]) -> Result<(), RendezvousError> {
    for (second, seat) in seats.iter().enumerate() {
        let Some(local_rank) = seat.local_rank else { continue };
        let same = |other: &Seat| other.machine == seat.machine && other.local_rank == seat.local_rank;
        if let Some(first) = seats[..second].iter().position(same) {
            return Err(RendezvousError::LocalRank { first, second, host: seat.machine.host.clone(), local_rank });
        }
    }
    Ok(())
}

/// The other ranks' part.
fn follow(
    job: &Rendezvous,
    begin: Instant,
    deadline: Duration,
    node_size: Option<usize>,
) -> Result<Mesh, RendezvousError> {
    let Rendezvous { rank, world, host, port, .. } = job;
    let (until, key) = (begin + deadline, JobKey::of(job));
    let refused = |reason: String| RendezvousError::Refused { rank: *rank, host: host.clone(), port: *port, reason };
    let system = |source| RendezvousError::System { rank: *rank, source };
    let (mut leader, left) =
        hello::knock((host, *port), 0, (*rank, *world), &key, until).map_err(|turned| match turned {
            Turned::Away(reason) => refused(reason),
            Turned::Late(last) => {
                let waited_ms = begin.elapsed().as_millis() as u64;
                RendezvousError::Unreachable { rank: *rank, host: host.clone(), port: *port, waited_ms, last }
            }
        })?;
    // Where rank 0 sees this rank, the others will. Over this machine's loopback it is not seen where those of other machines
    // will: then on all addresses, unless there are no other machines.
    let mut seen = leader.local_addr().map_err(system)?;
    seen.set_port(0);
    let listener = match seen.ip().is_loopback() && !job.is_local() {
        true => door::bind_all(0),
        false => TcpListener::bind(seen),
    };
    let listener = listener.map_err(system)?;
    listener.set_nonblocking(true).map_err(system)?;
    let own_port = listener.local_addr().map_err(system)?.port();
    let seat = Seat { machine: Machine::here(), local_rank: job.local_rank, address: None, port: own_port };
    // Rank 0 may have begun later, and waits for the others longer than this rank would.
    let until = until.max(Instant::now() + left);
    let ended = |error: Error| RendezvousError::Lost {
        rank: *rank,
        host: host.clone(),
        port: *port,
        reason: error.to_string(),
        what: match error.kind() {
            ErrorKind::TimedOut => {
                "it has said nothing for its own deadline and longer: is its process stopped, or its machine cut off?"
            }
            _ => "rank 0 ended, or gave up, before all ranks had connected; its own error says which are missing",
        },
    };
    say(&mut leader, &seat).map_err(ended)?;
    let until = until.max(Instant::now() + REST);
    let (token, seats) = match hear(&mut leader, until + LONGER).map_err(ended)? {
        Word::Table { token, seats } if seats.len() == *world => (token, seats),
        Word::Stop(reason) => return Err(refused(reason)),
        other => return Err(refused(format!("it said what does not belong here: {other:?}"))),
    };
    let until = until.max(Instant::now() + REST);
    let reached = reach(job, &leader, &listener, &key.with(&token), &seats, until);
    drop(listener);
    let report = reached.as_ref().map(|_| ()).map_err(Clone::clone);
    say(&mut leader, &report).map_err(ended)?;
    match hear(&mut leader, until + LONGER + LONGER).map_err(ended)? {
        Word::Go => {}
        Word::Stop(reason) => return Err(RendezvousError::Mesh { rank: *rank, reason }),
        other => return Err(refused(format!("it said what does not belong here: {other:?}"))),
    }
    let (mut streams, refused) = reached.map_err(|reason| RendezvousError::Mesh { rank: *rank, reason })?;
    streams.insert(0, leader);
    Ok(Mesh::new(*rank, (streams, refused), &seats, node_size))
}

/// Connects with every rank but rank 0.
fn reach(
    job: &Rendezvous,
    leader: &TcpStream,
    listener: &TcpListener,
    key: &JobKey,
    seats: &[Seat],
    until: Instant,
) -> Result<(BTreeMap<usize, TcpStream>, Vec<Refused>), String> {
    let Rendezvous { rank, world, .. } = *job;
    let mut streams = BTreeMap::new();
    // A rank on rank 0's machine may be known there by an address that means nothing elsewhere.
    let there = leader.peer_addr().map_err(|error| error.to_string())?.ip().to_canonical();
    for (peer, seat) in seats.iter().enumerate().take(rank).skip(1) {
        let address = seat.address.filter(|address| !address.is_loopback()).unwrap_or(there).to_string();
        let door = (address.as_str(), seat.port);
        let (stream, _) = hello::knock(door, peer, (rank, world), key, until).map_err(|turned| {
            let (Turned::Away(why) | Turned::Late(why)) = turned;
            format!("rank {rank} did not reach rank {peer} at {}:{} ({why})", door.0, door.1)
        })?;
        streams.insert(peer, stream);
    }
    let expected = Expected { at: rank, world, ranks: rank + 1..world, key };
    let (above, refused) = door::receive(listener, &expected, until)
        .map_err(|error| format!("rank {rank} got no sockets for its connections ({error})"))?;
    let missing: Vec<usize> = (rank + 1..world).filter(|peer| !above.contains_key(peer)).collect();
    streams.extend(above);
    match missing.is_empty() {
        true => Ok((streams, refused)),
        false => {
            let refused: Vec<String> = refused.iter().map(ToString::to_string).collect();
            Err(format!("rank {rank} was not reached by rank(s) {missing:?} {}", refused.join(", ")))
        }
    }
}

/// Sends everyone a message. Who has gone is noticed by what it does not answer.
fn tell(streams: &mut BTreeMap<usize, TcpStream>, word: &Word) {
    for stream in streams.values_mut() {
        let _ = say(stream, word);
    }
}

fn say<T: Serialize>(stream: &mut TcpStream, message: &T) -> std::io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(&text);
    stream.write_all(&bytes)
}

fn hear<T: DeserializeOwned>(stream: &mut TcpStream, until: Instant) -> std::io::Result<T> {
    let mut length = [0; 4];
    hello::read_all(stream, &mut length, until)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(Error::new(ErrorKind::InvalidData, "a message that is longer than any"));
    }
    let mut text = vec![0; length];
    hello::read_all(stream, &mut text, until)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(id: &str, host: &str, local_rank: Option<usize>) -> Seat {
        Seat { machine: Machine { id: id.into(), host: host.into() }, local_rank, address: None, port: 1 }
    }

    #[test]
    fn places_follow_from_machines_and_local_ranks() {
        let seats = [seat("a", "x", Some(1)), seat("b", "y", None), seat("a", "x", Some(0)), seat("b", "y", None)];
        compare(&seats).unwrap();
        let place = |rank: usize, node_size| Mesh::new(rank, Default::default(), &seats, node_size).place;
        assert_eq!(place(0, None).node_of, [0, 1, 0, 1]);
        assert_eq!((place(0, None).local_rank, place(2, None).local_rank), (1, 0), "the environment's");
        assert_eq!((place(1, None).local_rank, place(3, None).local_rank), (0, 1), "in the order of ranks");
        assert_eq!(place(3, Some(2)).node_of, [0, 0, 1, 1]);
    }

    #[test]
    fn one_local_rank_twice_on_a_host_is_told_with_both() {
        let twice = [seat("a", "x", Some(0)), seat("a", "x", Some(1)), seat("a", "x", Some(1))];
        let error = compare(&twice).unwrap_err().to_string();
        assert!(error.starts_with("ranks 1 and 2 are both on x and both have LOCAL_RANK 1"), "{error}");
        // Two containers of one machine, each with one process.
        compare(&[seat("a", "pod-0", Some(0)), seat("a", "pod-1", Some(0))]).unwrap();
    }
}
