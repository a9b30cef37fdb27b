say "looking at the machines"
on_all_ranks "$log_dir/doctor.log" @@doctor
code=$?
if [ "$code" -ne 0 ]; then
  say "miras-doctor ended with exit code $code, so nothing is trained:"
  tail -n 20 "$log_dir/doctor.log"
  finish "$code"
fi
