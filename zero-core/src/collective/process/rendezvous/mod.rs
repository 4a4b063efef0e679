//! Rendezvous of the ranks of a job: they find each other, and connect.
//!
//! 1. Rank 0 listens at `MASTER_ADDR`:`MASTER_PORT`. The others connect to it, name their rank and job, and prove that they
//!    know the job's secret, as rank 0 proves it to them ([`hello`]).
//! 2. Each rank sends rank 0 its machine and the port of its own listener. When all have, rank 0 sends every rank the table of
//!    these, with a token that proves that rank 0 has admitted the rank.
//! 3. Each rank connects to its lower neighbours ([`rounds::neighbours`]) except rank 0, and accepts the connections of the higher.
//! 4. Each rank reports to rank 0, which replies with go or the reason of a failure, and keeps the connections to its neighbours.
//!
//! So every other rank sends rank 0 five messages and connects with tens of ranks out of a thousand, and rank 0 has one
//! connection per rank. With up to 17 ranks, all are neighbours. Ranks that are not neighbours connect when they first
//! communicate ([`dial`]).
//!
//! A failure anywhere ends the rendezvous of all ranks with its reason. Ranks listen only at the address at which the others
//! reach them, and only until all have connected, unless some ranks are not neighbours. A job without a secret is restricted to
//! one machine, or to a network declared free of other users. Connections are not encrypted: anyone who can read or modify the
//! network traffic can read or modify parameters.

mod dial;
mod door;
mod error;
mod hello;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(super) use dial::Dial;
use dial::Directory;
use door::Expected;
pub use error::{RefusedConnections, RendezvousError};
use hello::{JobKey, Token, Turned};

use super::super::launcher::{Rendezvous, Topology, random};
use super::super::machine::Machine;
use super::super::rounds;

/// Minimum time for the remaining steps once all ranks have found rank 0.
const REST: Duration = Duration::from_secs(5);
/// Additional time that the others wait for rank 0's messages, so that its own error comes first.
const LONGER: Duration = Duration::from_secs(1);
/// Maximum size of a rendezvous message in bytes: a table of many thousand ranks.
const LONGEST: usize = 16 << 20;

/// A rank's connections to others, and its place among them.
pub(super) struct Mesh {
    /// Indexed by rank; `None` for itself and for ranks that are not neighbours.
    pub(super) streams: Vec<Option<TcpStream>>,
    /// Connects it with ranks that are not neighbours, if there are any.
    pub(super) dial: Option<Dial>,
    pub(super) place: Topology,
    /// Connections that this rank's listener refused.
    pub(super) refused: Vec<RefusedConnections>,
}

/// Description that a rank sends of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Seat {
    machine: Machine,
    /// The local rank from its environment.
    local_rank: Option<usize>,
    /// The port that it listens on.
    port: u16,
}

/// Rank 0's table entry for a rank: the first rank of its machine, its address as rank 0 sees it, and the port that it listens on.
/// It is small, as every rank gets an entry for every rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry(usize, Option<IpAddr>, u16);

/// A message from rank 0 to the others.
#[derive(Debug, Serialize, Deserialize)]
enum Word {
    Table {
        token: Token,
        table: Vec<Entry>,
    },
    Go,
    /// The rendezvous has failed.
    Stop(String),
}

impl Mesh {
    /// Creates the mesh of a single rank.
    pub(super) fn alone() -> Self {
        Self { streams: vec![None], dial: None, place: Topology::from_leaders(0, &[0]), refused: Vec::new() }
    }
}

/// Computes a rank's place from the first rank of each rank's machine and its local rank, or from `node_size` if given.
fn place(
    (rank, local_rank): (usize, Option<usize>),
    first: impl Iterator<Item = usize>,
    node_size: Option<usize>,
) -> Topology {
    let leader = |(of, first): (usize, usize)| node_size.map_or(first, |ranks| of - of % ranks.max(1));
    let mut place = Topology::from_leaders(rank, &first.enumerate().map(leader).collect::<Vec<_>>());
    if let (None, Some(local_rank)) = (node_size, local_rank) {
        place.local_rank = local_rank;
    }
    place
}

/// Builds this rank's mesh after all ranks have connected with their neighbours.
fn meshed(
    job: &Rendezvous,
    (deadline, node_size): (Duration, Option<usize>),
    (streams, refused): (BTreeMap<usize, TcpStream>, Vec<RefusedConnections>),
    (key, table): (JobKey, &[Entry]),
    (listener, there): (Option<TcpListener>, &str),
) -> std::io::Result<Mesh> {
    let Rendezvous { rank, world, local_rank, .. } = *job;
    let mut all: Vec<Option<TcpStream>> = (0..world).map(|_| None).collect();
    let near = rounds::neighbours(rank, world);
    for (peer, stream) in streams.into_iter().filter(|(peer, _)| near.contains(peer)) {
        all[peer] = Some(stream);
    }
    let doors = || table.iter().map(|entry| (entry.host(there), entry.2)).collect();
    let open = |listener| Dial::open(Directory { rank, key, doors: doors(), deadline }, near.into_iter(), listener);
    let dial = listener.filter(|_| has_strangers(rank, world)).map(open).transpose()?;
    let place = place((rank, local_rank), table.iter().map(|entry| entry.0), node_size);
    Ok(Mesh { streams: all, dial, place, refused })
}

/// Returns `true` if some ranks are not neighbours of this one.
fn has_strangers(rank: usize, world: usize) -> bool {
    rounds::neighbours(rank, world).len() + 1 < world
}

impl Entry {
    /// Returns the address at which the rank is reached. Rank 0 may see a rank on its own machine at a loopback address, which other
    /// machines cannot use; that rank is reached at rank 0's address, `there`.
    fn host(&self, there: &str) -> String {
        self.1.filter(|address| !address.is_loopback()).map_or_else(|| there.to_string(), |address| address.to_string())
    }
}

/// Connects this process with the other ranks of its job. A collective operation: every process calls it, once.
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

/// Runs rank 0's part of the rendezvous.
fn lead(
    job: &Rendezvous,
    begin: Instant,
    deadline: Duration,
    node_size: Option<usize>,
) -> Result<Mesh, RendezvousError> {
    let Rendezvous { world, host, port, .. } = job;
    let failed = |source| RendezvousError::Listen { host: host.clone(), port: *port, source };
    let system = |source| RendezvousError::System { rank: 0, source };
    room_for(*world);
    let listener = door::bind(host, *port).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let key = JobKey::of(job);
    let expected = Expected { at: 0, world: *world, ranks: (1..*world).collect(), key: &key };
    let (mut streams, refused) = door::receive(&listener, &expected, begin + deadline).map_err(system)?;
    drop(listener);
    // The port of the rendezvous is now free for the next job.
    let listener = has_strangers(0, *world).then(|| {
        let listener = door::bind(host, 0)?;
        listener.set_nonblocking(true).map(|()| listener)
    });
    let listener = listener.transpose().map_err(system)?;
    let own_port = listener.as_ref().and_then(|listener| listener.local_addr().ok()).map_or(0, |at| at.port());
    let missing: Vec<usize> = (1..*world).filter(|rank| !streams.contains_key(rank)).collect();
    if !missing.is_empty() {
        for stream in streams.values() {
            // They have been admitted: the next event that they see is the end of the connection.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let waited_ms = begin.elapsed().as_millis() as u64;
        return Err(RendezvousError::Missing { host: host.clone(), port: *port, waited_ms, missing, refused });
    }
    let settled = settle(job, own_port, &mut streams, (begin + deadline).max(Instant::now() + REST));
    let (token, table) = settled.inspect_err(|error| tell(&mut streams, &Word::Stop(error.to_string())))?;
    tell(&mut streams, &Word::Go);
    let known = (key.with(&token), &table[..]);
    meshed(job, (deadline, node_size), (streams, refused), known, (listener, host)).map_err(system)
}

/// Raises this process's limit of open files, as far as allowed, to the number that rank 0 needs until all ranks have connected.
fn room_for(world: usize) {
    let wanted = world as u64 + 512;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        // Root may raise the hard limit too. If the system refuses, ranks beyond the limit are refused with that reason.
        let maximum = limit.maximum.map(|most| most.max(wanted));
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
            .or_else(|_| setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }));
    }
}

/// Lets the ranks connect with one another after all have found rank 0.
fn settle(
    job: &Rendezvous,
    port: u16,
    streams: &mut BTreeMap<usize, TcpStream>,
    until: Instant,
) -> Result<(Token, Vec<Entry>), RendezvousError> {
    let mesh = |reason: String| RendezvousError::Mesh { rank: 0, reason };
    let lost = |rank: usize, error: Error| format!("contact with rank {rank} was lost during startup ({error})");
    let mut seats = vec![Seat { machine: Machine::here(), local_rank: job.local_rank, port }];
    let mut addresses = vec![None];
    for (&rank, stream) in &mut *streams {
        seats.push(hear(stream, until).map_err(|error| mesh(lost(rank, error)))?);
        addresses.push(stream.peer_addr().ok().map(|address| address.ip().to_canonical()));
    }
    compare(&seats)?;
    let firsts = firsts(&seats);
    let entries = firsts.into_iter().zip(addresses).zip(&seats);
    let table: Vec<Entry> = entries.map(|((first, address), seat)| Entry(first, address, seat.port)).collect();
    let token: Token = random().map_err(|source| RendezvousError::System { rank: 0, source })?;
    tell(streams, &Word::Table { token, table: table.clone() });
    let mut reasons = Vec::new();
    for (&rank, stream) in &mut *streams {
        match hear::<Result<(), String>>(stream, until + LONGER) {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => reasons.push(reason),
            Err(error) => reasons.push(lost(rank, error)),
        }
    }
    if reasons.is_empty() { Ok((token, table)) } else { Err(mesh(reasons.join("; "))) }
}

/// Returns, for each rank, the first rank on its machine.
fn firsts(seats: &[Seat]) -> Vec<usize> {
    let mut first = HashMap::new();
    let of = |(rank, seat): (usize, &Seat)| *first.entry(seat.machine.id.clone()).or_insert(rank);
    seats.iter().enumerate().map(of).collect()
}

/// Returns an error if two processes of one host have the same local rank. Each container of a machine counts as a host.
fn compare(seats: &[Seat]) -> Result<(), RendezvousError> {
    let mut seen = HashMap::new();
    for (second, Seat { machine, local_rank, .. }) in seats.iter().enumerate() {
        let Some(local_rank) = *local_rank else { continue };
        if let Some(first) = seen.insert((&machine.id, &machine.host, local_rank), second) {
            return Err(RendezvousError::LocalRank { first, second, host: machine.host.clone(), local_rank });
        }
    }
    Ok(())
}

/// Runs the other ranks' part of the rendezvous.
fn follow(
    job: &Rendezvous,
    begin: Instant,
    deadline: Duration,
    node_size: Option<usize>,
) -> Result<Mesh, RendezvousError> {
    let Rendezvous { rank, world, host, port, .. } = job;
    let (until, key) = (begin + deadline, JobKey::of(job));
    let refused =
        |reason: String| RendezvousError::RefusedConnections { rank: *rank, host: host.clone(), port: *port, reason };
    let system = |source| RendezvousError::System { rank: *rank, source };
    let (mut leader, left) =
        hello::knock((host, *port), 0, (*rank, *world), &key, until).map_err(|turned| match turned {
            Turned::Away(reason) => refused(reason),
            Turned::Late(last) => {
                let waited_ms = begin.elapsed().as_millis() as u64;
                RendezvousError::Unreachable { rank: *rank, host: host.clone(), port: *port, waited_ms, last }
            }
        })?;
    // The others reach this rank at the address at which rank 0 sees it, so it listens there. A loopback address cannot be
    // reached from other machines: then it listens on all addresses, unless there are no other machines.
    let mut seen = leader.local_addr().map_err(system)?;
    seen.set_port(0);
    let listener = match seen.ip().is_loopback() && !job.is_local() {
        true => door::bind_all(0),
        false => TcpListener::bind(seen),
    };
    let listener = listener.map_err(system)?;
    listener.set_nonblocking(true).map_err(system)?;
    let own_port = listener.local_addr().map_err(system)?.port();
    let seat = Seat { machine: Machine::here(), local_rank: job.local_rank, port: own_port };
    // Rank 0 may have started later, and then waits for the others longer than this rank would.
    let until = until.max(Instant::now() + left);
    let ended = |error: Error| RendezvousError::Lost {
        rank: *rank,
        host: host.clone(),
        port: *port,
        reason: error.to_string(),
        what: match error.kind() {
            ErrorKind::TimedOut => {
                "rank 0 has sent nothing for longer than its own deadline; check whether its process and its machine \
                 still respond"
            }
            _ => "rank 0 ended or timed out before all ranks had connected; its own error names the missing ranks",
        },
    };
    say(&mut leader, &seat).map_err(ended)?;
    let until = until.max(Instant::now() + REST);
    let (token, table) = match hear(&mut leader, until + LONGER).map_err(ended)? {
        Word::Table { token, table } if table.len() == *world => (token, table),
        Word::Stop(reason) => return Err(refused(reason)),
        other => return Err(refused(format!("it sent an unexpected message: {other:?}"))),
    };
    let until = until.max(Instant::now() + REST);
    let there = leader.peer_addr().map_err(system)?.ip().to_canonical().to_string();
    let key = key.with(&token);
    let reached = reach(job, &there, &listener, &key, &table, until);
    let report = reached.as_ref().map(|_| ()).map_err(Clone::clone);
    say(&mut leader, &report).map_err(ended)?;
    match hear(&mut leader, until + LONGER + LONGER).map_err(ended)? {
        Word::Go => {}
        Word::Stop(reason) => return Err(RendezvousError::Mesh { rank: *rank, reason }),
        other => return Err(refused(format!("it sent an unexpected message: {other:?}"))),
    }
    let (mut streams, refused) = reached.map_err(|reason| RendezvousError::Mesh { rank: *rank, reason })?;
    streams.insert(0, leader);
    meshed(job, (deadline, node_size), (streams, refused), (key, &table), (Some(listener), &there)).map_err(system)
}

/// Connects with every neighbour except rank 0.
fn reach(
    job: &Rendezvous,
    there: &str,
    listener: &TcpListener,
    key: &JobKey,
    table: &[Entry],
    until: Instant,
) -> Result<(BTreeMap<usize, TcpStream>, Vec<RefusedConnections>), String> {
    let Rendezvous { rank, world, .. } = *job;
    let mut streams = BTreeMap::new();
    let near = rounds::neighbours(rank, world);
    for &peer in near.iter().filter(|&&peer| (1..rank).contains(&peer)) {
        let address = table[peer].host(there);
        let door = (address.as_str(), table[peer].2);
        let (stream, _) = hello::knock(door, peer, (rank, world), key, until).map_err(|turned| {
            let (Turned::Away(why) | Turned::Late(why)) = turned;
            format!("rank {rank} could not reach rank {peer} at {}:{} ({why})", door.0, door.1)
        })?;
        streams.insert(peer, stream);
    }
    let ranks: BTreeSet<usize> = near.into_iter().filter(|&peer| peer > rank).collect();
    let expected = Expected { at: rank, world, ranks, key };
    let (above, refused) = door::receive(listener, &expected, until)
        .map_err(|error| format!("rank {rank} could not create sockets for its connections ({error})"))?;
    let missing: Vec<usize> = expected.ranks.into_iter().filter(|peer| !above.contains_key(peer)).collect();
    streams.extend(above);
    match missing.is_empty() {
        true => Ok((streams, refused)),
        false => {
            let refused: Vec<String> = refused.iter().map(ToString::to_string).collect();
            Err(format!(
                "rank(s) {missing:?} did not connect to rank {rank}; refused connections: [{}]",
                refused.join(", ")
            ))
        }
    }
}

/// Sends every rank a message. A rank that has ended is noticed later by its missing answer.
fn tell(streams: &mut BTreeMap<usize, TcpStream>, word: &Word) {
    for stream in streams.values_mut() {
        let _ = say(stream, word);
    }
}

fn say<T: Serialize>(stream: &mut TcpStream, message: &T) -> std::io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(&text);
    hello::send(stream, &bytes)
}

fn hear<T: DeserializeOwned>(stream: &mut TcpStream, until: Instant) -> std::io::Result<T> {
    let mut length = [0; 4];
    hello::read_all(stream, &mut length, until)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(Error::new(ErrorKind::InvalidData, "the message is longer than the limit"));
    }
    let mut text = vec![0; length];
    hello::read_all(stream, &mut text, until)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::super::tests::processor;
    use super::*;

    fn seat(id: &str, host: &str, local_rank: Option<usize>) -> Seat {
        Seat { machine: Machine { id: id.into(), host: host.into() }, local_rank, port: 1 }
    }

    #[test]
    fn places_follow_from_machines_and_local_ranks() {
        let seats = [seat("a", "x", Some(1)), seat("b", "y", None), seat("a", "x", Some(0)), seat("b", "y", None)];
        compare(&seats).unwrap();
        let place =
            |rank: usize, node_size| place((rank, seats[rank].local_rank), firsts(&seats).into_iter(), node_size);
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

    /// Connects `ranks` of a run of `world` at `port`, as threads of this process. Returns the number of messages and bytes that each
    /// sent, and of its connections.
    fn meet(world: usize, port: u16, ranks: std::ops::Range<usize>) -> Vec<[usize; 3]> {
        let rank = |rank: usize| {
            let job = Rendezvous { rank, world, host: "127.0.0.1".into(), port, ..Rendezvous::default() };
            let mesh = connect(&job, Duration::from_secs(120), Some(8), false).unwrap();
            assert_eq!((mesh.place.world, mesh.place.nodes), (world, world.div_ceil(8)));
            let [messages, bytes] = hello::SENT.get();
            [messages, bytes, mesh.streams.iter().flatten().count()]
        };
        let rank = &rank;
        std::thread::scope(|scope| {
            let spawn =
                |at| std::thread::Builder::new().stack_size(1 << 20).spawn_scoped(scope, move || rank(at)).unwrap();
            let ranks: Vec<_> = ranks.map(spawn).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Maximum number of ranks per process: each connection is an open file, and these are limited.
    const OF_A_PROCESS: usize = 256;
    /// Environment variable that passes a process of the test its ranks.
    const RANKS: &str = "ZERO_TEST_RANKS";

    /// Connects `world` ranks over the loopback interface, and checks the traffic of rank 0, and the maximum over the others.
    fn check_cost(world: usize) -> String {
        let port = door::bind("127.0.0.1", 0).unwrap().local_addr().unwrap().port();
        room_for((world.min(OF_A_PROCESS)) * (rounds::neighbours(0, world).len() + 2) * 2 + world);
        let before = processor();
        let all: Vec<[usize; 3]> = match world <= OF_A_PROCESS {
            true => meet(world, port, 0..world),
            false => {
                let of = |begin: usize| {
                    let mut process = std::process::Command::new(std::env::current_exe().unwrap());
                    process.args([
                        "--ignored",
                        "--exact",
                        "--nocapture",
                        "collective::process::rendezvous::tests::a_part",
                    ]);
                    process.env(RANKS, format!("{world} {port} {begin}")).stdout(std::process::Stdio::piped());
                    process.spawn().unwrap()
                };
                let processes: Vec<_> = (0..world).step_by(OF_A_PROCESS).map(of).collect();
                let told = processes.into_iter().flat_map(|process| {
                    let output = process.wait_with_output().unwrap();
                    assert!(output.status.success());
                    let text = String::from_utf8(output.stdout).unwrap();
                    let line = text.lines().find_map(|line| line.strip_prefix("sent ")).expect("it tells").to_string();
                    serde_json::from_str::<Vec<[usize; 3]>>(&line).unwrap()
                });
                told.collect()
            }
        };
        let most = |of: usize| all[1..].iter().map(|rank| rank[of]).max().unwrap();
        let (first, near) = (all[0], rounds::neighbours(0, world).len());
        // Rank 0: two answers on connecting, the table and go. Others: five to rank 0, three to lower or two to higher neighbours.
        assert!(first[0] <= 4 * (world - 1), "{world} ranks: rank 0 sent {} messages", first[0]);
        assert!(most(0) <= 5 + 3 * near, "{world} ranks: a rank sent {} messages", most(0));
        assert_eq!(most(2), near);
        let each = (processor() - before) / world as u32;
        format!("| {world} | {} | {} | {} | {} | {near} | {each:.1?} |", first[0], first[1], most(0), most(1))
    }

    #[test]
    fn ranks_connect_with_few() {
        check_cost(72);
    }

    #[test]
    #[ignore = "a part of a_thousand_ranks_meet, in a process of its own"]
    fn a_part() {
        let Ok(told) = std::env::var(RANKS) else { return };
        let [world, port, begin] = told.split(' ').map(|word| word.parse().unwrap()).collect::<Vec<usize>>()[..] else {
            panic!("{told}")
        };
        let sent = meet(world, port as u16, begin..world.min(begin + OF_A_PROCESS));
        println!("\nsent {}", serde_json::to_string(&sent).unwrap());
    }

    #[test]
    #[ignore = "a minute of two processors, and 13,000 files a process"]
    fn a_thousand_ranks_meet() {
        println!(
            "| ranks | rank 0 sent messages, bytes | | the most of another | | connections | processor time a rank |"
        );
        for world in [64, 256, 1_024] {
            println!("{}", check_cost(world));
        }
    }
}
