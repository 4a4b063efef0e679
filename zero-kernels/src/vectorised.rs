//! Plain loops, compiled for several instruction sets.

/// Functions whose bodies the compiler vectorises for the instruction set that the processor is found to have. They are that of
/// a `pulp::NullaryFnOnce`, inlined: a closure in its place would be compiled for the baseline.
macro_rules! vectorised {
    (@) => { () };
    (@ $out:ty) => { $out };
    ($($(#[$meta:meta])* $vis:vis fn $name:ident<$a:lifetime>($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::needless_lifetimes)]
        $vis fn $name<$a>($($arg: $type),*) $(-> $out)? {
            struct Call<$a> {
                $($arg: $type),*
            }

            impl<$a> pulp::NullaryFnOnce for Call<$a> {
                type Output = vectorised!(@ $($out)?);

                #[inline(always)]
                fn call(self) -> Self::Output {
                    let Self { $($arg),* } = self;
                    $body
                }
            }

            pulp::Arch::new().dispatch(Call { $($arg),* })
        }
    )*};
}
