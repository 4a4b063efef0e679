//! Admission to a job: strangers, second processes of a rank, and ranks of other jobs are refused, and delay nobody.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};

use hmac::{Hmac, Mac};
use sha2::Sha256;
use zero_core::collective::launcher::Secret;

use super::*;

/// Sends `hello` to rank 0, and returns the answer.
pub(super) fn stranger(port: u16, hello: &[u8]) -> String {
    let mut stream = reach(port);
    let _ = stream.write_all(hello);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    String::from_utf8_lossy(&said).into_owned()
}

/// Returns the greeting of a job without an id and a secret, whose random number is all zeros.
pub(super) fn hello(protocol: u32, world: u32, rank: u32) -> Vec<u8> {
    [&b"zerorank"[..], &protocol.to_le_bytes(), &world.to_le_bytes(), &rank.to_le_bytes(), &[0; 97]].concat()
}

/// Joins a job without a secret as rank 1 of 3, up to the confirmation of the welcome. Returns the connection, and the time
/// left that the welcome states.
fn join_by_hand(port: u16) -> (TcpStream, Duration) {
    let (mut stream, hello) = (reach(port), hello(5, 3, 1));
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; 36];
    stream.read_exact(&mut challenge).unwrap();
    assert_eq!(challenge[..4], [0; 4], "{challenge:?}");
    let code = |role: &[u8]| {
        let mut code = Hmac::<Sha256>::new_from_slice(&[]).unwrap();
        [role, &[0; 8], &hello, &challenge[4..]].iter().for_each(|part| code.update(part));
        code.finalize().into_bytes()
    };
    stream.write_all(&code(b"rank")).unwrap();
    let mut welcome = [0; 40];
    stream.read_exact(&mut welcome).unwrap();
    assert_eq!((&welcome[..4], &welcome[8..]), (&[0; 4][..], &code(b"door")[..]));
    stream.write_all(&[1]).unwrap();
    (stream, Duration::from_millis(u32::from_le_bytes(welcome[4..8].try_into().unwrap()).into()))
}

#[test]
fn strangers_are_refused_and_the_job_goes_on() {
    let port = free_port();
    std::thread::scope(|scope| {
        let hub = scope.spawn(move || {
            let comm = connect(&place(0, 3, port), &options(PATIENT)).unwrap();
            comm.all_reduce(Buffer::F32(vec![1.0]), ReduceOp::Sum).unwrap().into_f32()[0]
        });
        let silent = scope.spawn(move || stranger(port, b""));
        assert!(stranger(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").contains("does not speak this protocol"));
        assert!(stranger(port, &hello(1, 3, 1)).contains("version 1 of the protocol, rank 0 version 5"));
        assert!(stranger(port, &hello(5, 3, 3)).contains("RANK is 3, expected one from 1 to 2"));
        let wrong = connect(&place(1, 5, port), &options(PATIENT)).unwrap_err().to_string();
        assert!(wrong.contains("its WORLD_SIZE is 5, rank 0's is 3"), "{wrong}");
        let one = scope.spawn(move || {
            let comm = connect(&place(1, 3, port), &options(PATIENT)).unwrap();
            comm.all_reduce(Buffer::F32(vec![1.0]), ReduceOp::Sum).unwrap().into_f32()[0]
        });
        let two = scope.spawn(move || {
            let comm = connect(&place(2, 3, port), &options(PATIENT)).unwrap();
            comm.all_reduce(Buffer::F32(vec![1.0]), ReduceOp::Sum).unwrap().into_f32()[0]
        });
        for rank in [hub, one, two] {
            assert_eq!(rank.join().unwrap(), 3.0);
        }
        silent.join().unwrap();
    });
}

/// Connects to rank 0 as soon as it listens.
fn reach(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn a_second_process_of_a_rank_is_refused_unless_the_first_has_gone() {
    let port = free_port();
    std::thread::scope(|scope| {
        let joins = move |rank| {
            let comm = connect(&place(rank, 3, port), &options(PATIENT)).unwrap();
            comm.all_reduce(Buffer::F32(vec![1.0]), ReduceOp::Sum).unwrap().into_f32()[0]
        };
        let hub = scope.spawn(move || joins(0));
        // Welcomed, and told how long rank 0 still waits.
        let (first, left) = join_by_hand(port);
        assert!(left > PATIENT / 2, "{left:?}");
        let error = connect(&place(1, 3, port), &options(PATIENT)).unwrap_err().to_string();
        assert!(
            error.contains("its RANK is 1, and that rank has already connected; give each process its own RANK"),
            "{error}"
        );
        drop(first);
        for rank in [hub, scope.spawn(move || joins(1)), scope.spawn(move || joins(2))] {
            assert_eq!(rank.join().unwrap(), 3.0);
        }
    });
}

#[test]
fn a_rank_that_is_lost_while_ranks_connect_is_named() {
    let port = free_port();
    std::thread::scope(|scope| {
        let after = move |rank| connect(&place(rank, 3, port), &options(PATIENT)).unwrap_err().to_string();
        let (hub, two) = (scope.spawn(move || after(0)), scope.spawn(move || after(2)));
        // It says that it is there, and nothing more; all have come then.
        let (first, _) = join_by_hand(port);
        std::thread::sleep(Duration::from_millis(1500));
        assert_listens_on_loopback_alone();
        drop(first);
        for error in [hub.join().unwrap(), two.join().unwrap()] {
            assert!(error.contains("contact with rank 1 was lost during startup"), "{error}");
        }
    });
}

/// Rank 1 gives a listening address at which nobody listens.
#[test]
fn a_rank_that_another_cannot_reach_is_named_by_all() {
    let port = free_port();
    std::thread::scope(|scope| {
        let after =
            move |rank| connect(&place(rank, 3, port), &options(Duration::from_secs(2))).unwrap_err().to_string();
        let others = [0, 2].map(|rank| scope.spawn(move || after(rank)));
        let (mut first, _) = join_by_hand(port);
        let seat = format!(
            "{{\"machine\":{{\"id\":\"a\",\"host\":\"b\"}},\"local_rank\":1,\"address\":null,\"port\":{}}}",
            free_port()
        );
        first.write_all(&(seat.len() as u32).to_le_bytes()).unwrap();
        first.write_all(seat.as_bytes()).unwrap();
        let fine = b"{\"Ok\":null}";
        first.write_all(&(fine.len() as u32).to_le_bytes()).unwrap();
        first.write_all(fine).unwrap();
        for other in others {
            let error = other.join().unwrap();
            assert!(error.contains("rank 2 could not reach rank 1 at 127.0.0.1:"), "{error}");
            assert!(error.contains("every rank must be able to reach every other"), "{error}");
        }
    });
}

/// Asserts that other machines cannot reach any socket on which this process listens.
#[track_caller]
fn assert_listens_on_loopback_alone() {
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| Some(std::fs::read_link(entry.ok()?.path()).ok()?.to_string_lossy().into_owned()))
        .collect();
    let mut listening = 0;
    for (file, loopback) in [("tcp", "0100007F:"), ("tcp6", "00000000000000000000000001000000:")] {
        let table = std::fs::read_to_string(format!("/proc/self/net/{file}")).unwrap_or_default();
        for line in table.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words[3] == "0A" && own.contains(&format!("socket:[{}]", words[9])) {
                assert!(words[1].starts_with(loopback), "{line}");
                listening += 1;
            }
        }
    }
    assert!(listening > 0, "a rank waits for another");
}

#[test]
fn ranks_without_a_secret_meet_on_this_machine_or_a_trusted_network_only() {
    let port = free_port();
    // An address for documentation: nothing is sent to it, and nothing can be bound to it.
    let far = |rank, trusted_network| Rendezvous { host: "192.0.2.1".into(), trusted_network, ..place(rank, 2, port) };
    let short = options(Duration::from_millis(50));
    for rank in [0, 1] {
        let error = connect(&far(rank, false), &short).unwrap_err();
        assert!(matches!(error, RendezvousError::Untrusted { .. }) && !error.is_transient(), "{error}");
        assert!(
            error.to_string().contains("ZERO_SECRET") && error.to_string().contains("--trusted-network"),
            "{error}"
        );
    }
    let error = connect(&far(1, true), &short).unwrap_err();
    assert!(matches!(error, RendezvousError::Unreachable { .. }), "{error}");
    let secret = Rendezvous { secret: Secret::new("0123456789abcdef"), ..far(1, false) };
    assert!(matches!(connect(&secret, &short).unwrap_err(), RendezvousError::Unreachable { .. }));
    let trusted = ProcessOptions { trusted_network: true, ..short };
    assert!(matches!(connect(&far(1, false), &trusted).unwrap_err(), RendezvousError::Unreachable { .. }));
}

/// Ranks that know the secret are admitted. Ranks of another job, or with a wrong or no secret, are refused, with an error on both sides.
#[test]
fn ranks_prove_that_they_are_of_the_job() {
    let port = free_port();
    let with = |rank, id: &str, secret: &str| Rendezvous {
        id: id.into(),
        secret: Secret::new(secret),
        ..place(rank, 2, port)
    };
    const OURS: &str = "a secret of 28 characters...";
    std::thread::scope(|scope| {
        let own = with(0, "Slurm 7", OURS);
        let hub = scope.spawn(move || start(&options(PATIENT), &Start::Job(own)).unwrap());
        for (other, says) in [
            (with(1, "Slurm 8", OURS), "it belongs to another job, 'Slurm 8', not to 'Slurm 7'"),
            (with(1, "Slurm 7", "another secret of the same ch"), "it does not know this job's secret; give all ranks"),
            (with(1, "Slurm 7", ""), "it has no ZERO_SECRET, and rank 0 has one"),
        ] {
            let error = connect(&other, &options(PATIENT)).unwrap_err().to_string();
            assert!(error.contains("rank 1 was refused at 127.0.0.1") && error.contains(says), "{error}");
        }
        let one = start(&options(PATIENT), &Start::Job(with(1, "Slurm 7", OURS))).unwrap();
        let hub = hub.join().unwrap();
        assert_eq!((hub.warnings().len(), one.warnings().len()), (3, 0), "{:?}", hub.warnings());
        let leaves = scope.spawn(|| one.finish().unwrap());
        hub.finish().unwrap();
        leaves.join().unwrap();
    });
}

/// Opens 10,000 connections of strangers: nonsense, partial greetings, false proofs, closed connections. The job starts
/// nevertheless, and logs once for each kind what it has refused.
#[test]
fn strangers_at_the_door_hold_up_nobody() {
    const STRANGERS: usize = 10_000;
    let port = free_port();
    let job = |rank| Rendezvous { id: "ours".into(), secret: Secret::new("0123456789abcdef"), ..place(rank, 3, port) };
    let come = AtomicUsize::new(0);
    let (come, begun) = (&come, &AtomicUsize::new(0));
    let right = {
        let mut hello = hello(5, 3, 1);
        hello[20] = 1;
        hello[21..25].copy_from_slice(b"ours");
        hello
    };
    let right = &right;
    std::thread::scope(|scope| {
        let joins = move |rank| {
            let run = start(&options(PATIENT), &Start::Job(job(rank))).unwrap();
            begun.fetch_add(1, Ordering::Relaxed);
            let sum = run.comm().all_reduce(Buffer::F32(vec![1.0]), ReduceOp::Sum).unwrap().into_f32()[0];
            let warnings = run.warnings().to_vec();
            run.finish().unwrap();
            (sum, warnings)
        };
        let hub = scope.spawn(move || joins(0));
        drop(reach(port));
        for _ in 0..8 {
            scope.spawn(move || {
                // Those that stall stay, some hundred of them at a time, until the job has begun.
                let mut stalling = VecDeque::new();
                while begun.load(Ordering::Relaxed) == 0 {
                    let number = come.fetch_add(1, Ordering::Relaxed);
                    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { break };
                    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
                    let _ = match number % 4 {
                        0 => stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
                        1 => stream.write_all(&right[..50]),
                        2 => {
                            let asked = stream.write_all(right).and_then(|()| stream.read_exact(&mut [0; 36]));
                            asked.and_then(|()| stream.write_all(&[7; 33]))
                        }
                        _ => Ok(()),
                    };
                    if number % 4 == 1 {
                        stalling.push_back(stream);
                        if stalling.len() > 40 {
                            stalling.pop_front();
                        }
                    }
                    if number > STRANGERS {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                }
            });
        }
        let limit = Instant::now() + PATIENT;
        while come.load(Ordering::Relaxed) < STRANGERS {
            assert!(Instant::now() < limit, "{} strangers have come", come.load(Ordering::Relaxed));
            std::thread::sleep(Duration::from_millis(5));
        }
        let other = connect(&Rendezvous { id: "theirs".into(), ..job(1) }, &options(PATIENT)).unwrap_err().to_string();
        assert!(other.contains("it belongs to another job, 'theirs'"), "{other}");
        let since = Instant::now();
        let (one, two) = (scope.spawn(move || joins(1)), scope.spawn(move || joins(2)));
        let (sum, warnings) = hub.join().unwrap();
        assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
        assert_eq!((sum, one.join().unwrap().0, two.join().unwrap().0), (3.0, 3.0, 3.0));
        let told = |of: &str| {
            let mut lines = warnings.iter().filter(|line| line.contains(of));
            let line = lines.next().unwrap_or_else(|| panic!("nothing of '{of}' in {warnings:#?}"));
            assert!(lines.next().is_none(), "{warnings:#?}");
            line.split(' ').next().unwrap().parse::<usize>().unwrap()
        };
        assert!(told("it does not speak this protocol") > STRANGERS / 5, "{warnings:#?}");
        assert!(told("it does not know this job's secret") > STRANGERS / 5, "{warnings:#?}");
        assert!(told("other connections arrived") > STRANGERS / 10, "{warnings:#?}");
        assert_eq!(told("another job, 'theirs'"), 1);
        assert!(warnings.len() < 18, "{warnings:#?}");
    });
}

/// Running out of file descriptors for new connections is reported as such, not as missing ranks.
#[test]
fn strangers_do_not_take_the_last_descriptor() {
    const PORT: &str = "ZERO_TEST_DESCRIPTORS_PORT";
    let run = |port: u16| {
        // SAFETY: sets a limit of this process.
        let refused = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: 40, rlim_max: 40 }) };
        assert_eq!(refused, 0);
        std::thread::scope(|scope| {
            let rank = |rank| scope.spawn(move || start(&options(PATIENT), &Start::Job(place(rank, 2, port))).unwrap());
            let hub = rank(0);
            std::thread::sleep(Duration::from_secs(2));
            let (one, hub) = (rank(1).join().unwrap(), hub.join().unwrap());
            assert!(hub.warnings().iter().any(|line| line.contains("cannot accept it")), "{:?}", hub.warnings());
            let leaves = scope.spawn(|| one.finish().unwrap());
            hub.finish().unwrap();
            leaves.join().unwrap();
        });
    };
    if let Some(port) = std::env::var(PORT).ok().and_then(|port| port.parse().ok()) {
        return run(port);
    }
    let port = free_port();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "door::strangers_do_not_take_the_last_descriptor", "--nocapture"])
        .env(PORT, port.to_string())
        .spawn()
        .unwrap();
    let end = Instant::now() + PATIENT;
    let mut silent = Vec::new();
    let code = loop {
        if silent.len() < 100 {
            silent.extend(TcpStream::connect(("127.0.0.1", port)));
        }
        if let Some(code) = child.try_wait().unwrap() {
            break code;
        }
        if Instant::now() > end {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(code.success() && silent.len() > 40, "{code}, {} strangers", silent.len());
}
