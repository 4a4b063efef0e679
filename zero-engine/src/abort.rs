//! Functions that end a rank from code that cannot return errors.

use zero_core::CommError;
use zero_core::collective::threads::Stopped;
use zero_core::offload::DiskError;

use crate::current::CURRENT;

/// Ends a computation that cannot return an error: the launcher catches the payload, and nothing is printed. On a thread that no launch has
/// started, it is an ordinary panic, so that the thread does not end silently.
pub fn raise(error: CommError) -> ! {
    if std::thread::current()
        .name()
        .is_none_or(|name| !["rank-", "update-"].iter().any(|begin| name.starts_with(begin)))
    {
        panic!("{error}");
    }
    std::panic::resume_unwind(Box::new(error))
}

/// Ends a computation that cannot return an error, for a reason other than a collective (misuse of the library, a lost thread). Like
/// [`raise`], it prints nothing: whoever reports the launch's error does. Outside of a launch, it is an ordinary panic.
pub fn stop(message: String) -> ! {
    if CURRENT.with_borrow(Option::is_some) {
        std::panic::resume_unwind(Box::new(Stopped(message)))
    } else {
        panic!("{message}")
    }
}

/// Ends the rank with an error about a parameter that another rank or launch has built.
pub fn stop_foreign(shape: &[usize]) -> ! {
    stop(format!(
        "a model with a parameter of shape {:?} was built outside of this launch, or by another of its ranks: build it \
         inside of the function that launch runs, on the device that the function gets; to bring values along, save a \
         record of the model outside and load it inside",
        shape
    ))
}

/// Ends the rank if `result` is an error of its disk, from code that cannot return errors. Nothing is printed: whoever reports the launch's
/// error does.
pub fn or_stop<T>(result: Result<T, DiskError>) -> T {
    result.unwrap_or_else(|error| std::panic::resume_unwind(Box::new(Stopped(error.to_string()))))
}
