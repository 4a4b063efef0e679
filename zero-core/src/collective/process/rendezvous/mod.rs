//! How the ranks of a job find each other, and connect.
//!
//! 1. Rank 0 listens at `MASTER_ADDR`:`MASTER_PORT`; the others connect to it, say which rank of which job they are, and prove
//!    that they know its secret, as rank 0 proves it to them ([`hello`]).
//! 2. Each tells rank 0 its machine and the port of a listener of its own. When all have, rank 0 sends everyone the table of
//!    them, with a token that stands for having come so far.
//! 3. Each connects to its neighbours ([`rounds::neighbours`]) between rank 0 and itself, and takes the connections of those above.
//! 4. Each reports to rank 0, which says go, or why not, and keeps its own neighbours.
//!
//! So a rank other than rank 0 says four words to rank 0 and connects with tens of a thousand, and rank 0 hears each rank
//! once. Up to 17 ranks each is every other's neighbour. Where it is not, ranks connect when they first have something to say
//! to one another ([`dial`]).
//!
//! Trouble anywhere ends the rendezvous of all ranks with its reason. Ranks listen only at the address at which the others reach
//! them, and only until all have connected, unless there are ranks that are no neighbours. A job without a secret is for one machine, or for a network that is said to have
//! nobody else on it. What is not meant: encryption. Who can listen in on the network, or change what goes over it, sees and
//! changes parameters.

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
pub use error::{Refused, RendezvousError};
use hello::{JobKey, Token, Turned};

use super::super::launcher::{Place, Rendezvous, random};
use super::super::machine::Machine;
use super::super::rounds;

/// What ranks that have all found rank 0 have at least left for the rest.
const REST: Duration = Duration::from_secs(5);
/// How much longer than rank 0 the others wait for what it says, so that its own error comes first.
const LONGER: Duration = Duration::from_secs(1);
/// The longest message of a rendezvous: a table of many thousand ranks.
const LONGEST: usize = 16 << 20;

/// A rank's connections to others, and its place among them.
pub(super) struct Mesh {
    /// By rank; none to itself and to ranks that are no neighbours.
    pub(super) streams: Vec<Option<TcpStream>>,
    /// What connects it with ranks that are no neighbours, if there are any.
    pub(super) dial: Option<Dial>,
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
    /// Where it listens.
    port: u16,
}

/// What rank 0 tells of a rank: the first rank of its machine, its address as rank 0 sees it, and the port where it listens. In few
/// bytes, as each rank is told of each.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry(usize, Option<IpAddr>, u16);

/// What rank 0 tells the others.
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
    /// The only rank.
    pub(super) fn alone() -> Self {
        Self { streams: vec![None], dial: None, place: Place::from_leaders(0, &[0]), refused: Vec::new() }
    }
}

/// Where a rank is, by the first rank of each one's machine, by its environment, or by so many ranks in a row.
fn place(
    (rank, local_rank): (usize, Option<usize>),
    first: impl Iterator<Item = usize>,
    node_size: Option<usize>,
) -> Place {
    let leader = |(of, first): (usize, usize)| node_size.map_or(first, |ranks| of - of % ranks.max(1));
    let mut place = Place::from_leaders(rank, &first.enumerate().map(leader).collect::<Vec<_>>());
    if let (None, Some(local_rank)) = (node_size, local_rank) {
        place.local_rank = local_rank;
    }
    place
}

/// All ranks have connected with their neighbours: what this one has.
fn meshed(
    job: &Rendezvous,
    (deadline, node_size): (Duration, Option<usize>),
    (streams, refused): (BTreeMap<usize, TcpStream>, Vec<Refused>),
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

/// Whether there are ranks that are no neighbours of this one.
fn has_strangers(rank: usize, world: usize) -> bool {
    rounds::neighbours(rank, world).len() + 1 < world
}

impl Entry {
    /// Where the rank is reached. One on rank 0's machine may be known there by an address that means nothing elsewhere: it is where
    /// rank 0 is, `there`.
    fn host(&self, there: &str) -> String {
        self.1.filter(|address| !address.is_loopback()).map_or_else(|| there.to_string(), |address| address.to_string())
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
    let system = |source| RendezvousError::System { rank: 0, source };
    room_for(*world);
    let listener = door::bind(host, *port).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let key = JobKey::of(job);
    let expected = Expected { at: 0, world: *world, ranks: (1..*world).collect(), key: &key };
    let (mut streams, refused) = door::receive(&listener, &expected, begin + deadline).map_err(system)?;
    drop(listener);
    // The port of the rendezvous is free for the next.
    let listener = has_strangers(0, *world).then(|| {
        let listener = door::bind(host, 0)?;
        listener.set_nonblocking(true).map(|()| listener)
    });
    let listener = listener.transpose().map_err(system)?;
    let own_port = listener.as_ref().and_then(|listener| listener.local_addr().ok()).map_or(0, |at| at.port());
    let missing: Vec<usize> = (1..*world).filter(|rank| !streams.contains_key(rank)).collect();
    if !missing.is_empty() {
        for stream in streams.values() {
            // They have been welcomed: what comes next is the end.
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

/// Raises this process's limit of open files, as far as it may, to what rank 0 needs until all ranks have come.
fn room_for(world: usize) {
    let wanted = world as u64 + 512;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        // Root may raise the most too. If it is refused, ranks are told that there is no room for them.
        let maximum = limit.maximum.map(|most| most.max(wanted));
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
            .or_else(|_| setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }));
    }
}

/// All ranks have found rank 0: lets them connect with one another.
fn settle(
    job: &Rendezvous,
    port: u16,
    streams: &mut BTreeMap<usize, TcpStream>,
    until: Instant,
) -> Result<(Token, Vec<Entry>), RendezvousError> {
    let mesh = |reason: String| RendezvousError::Mesh { rank: 0, reason };
    let lost = |rank: usize, error: Error| format!("rank {rank} was lost while the ranks connected ({error})");
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

/// Of each rank, the first one on its machine.
fn firsts(seats: &[Seat]) -> Vec<usize> {
    let mut first = HashMap::new();
    let of = |(rank, seat): (usize, &Seat)| *first.entry(seat.machine.id.clone()).or_insert(rank);
    seats.iter().enumerate().map(of).collect()
}

/// Two processes of one host that say that they are the same one of it. Containers of one machine count on their own.
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
    let seat = Seat { machine: Machine::here(), local_rank: job.local_rank, port: own_port };
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
    let (token, table) = match hear(&mut leader, until + LONGER).map_err(ended)? {
        Word::Table { token, table } if table.len() == *world => (token, table),
        Word::Stop(reason) => return Err(refused(reason)),
        other => return Err(refused(format!("it said what does not belong here: {other:?}"))),
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
        other => return Err(refused(format!("it said what does not belong here: {other:?}"))),
    }
    let (mut streams, refused) = reached.map_err(|reason| RendezvousError::Mesh { rank: *rank, reason })?;
    streams.insert(0, leader);
    meshed(job, (deadline, node_size), (streams, refused), (key, &table), (Some(listener), &there)).map_err(system)
}

/// Connects with every neighbour but rank 0.
fn reach(
    job: &Rendezvous,
    there: &str,
    listener: &TcpListener,
    key: &JobKey,
    table: &[Entry],
    until: Instant,
) -> Result<(BTreeMap<usize, TcpStream>, Vec<Refused>), String> {
    let Rendezvous { rank, world, .. } = *job;
    let mut streams = BTreeMap::new();
    let near = rounds::neighbours(rank, world);
    for &peer in near.iter().filter(|&&peer| (1..rank).contains(&peer)) {
        let address = table[peer].host(there);
        let door = (address.as_str(), table[peer].2);
        let (stream, _) = hello::knock(door, peer, (rank, world), key, until).map_err(|turned| {
            let (Turned::Away(why) | Turned::Late(why)) = turned;
            format!("rank {rank} did not reach rank {peer} at {}:{} ({why})", door.0, door.1)
        })?;
        streams.insert(peer, stream);
    }
    let ranks: BTreeSet<usize> = near.into_iter().filter(|&peer| peer > rank).collect();
    let expected = Expected { at: rank, world, ranks, key };
    let (above, refused) = door::receive(listener, &expected, until)
        .map_err(|error| format!("rank {rank} got no sockets for its connections ({error})"))?;
    let missing: Vec<usize> = expected.ranks.into_iter().filter(|peer| !above.contains_key(peer)).collect();
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
    hello::send(stream, &bytes)
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

    /// Ranks of a run of `world` that meet at `port`, threads of this process: of each the messages and bytes that it sent, and its
    /// connections.
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

    /// Ranks of one process: its files are limited, and each connection is one.
    const OF_A_PROCESS: usize = 256;
    /// Where a process of the test is told its ranks.
    const RANKS: &str = "ZERO_TEST_RANKS";

    /// Lets `world` ranks meet over this machine's loopback, and checks what they sent: of rank 0, and the most of another.
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
        // Two answers at the door, the table and go. Another: five to rank 0, and three to neighbours below or two to those above.
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
