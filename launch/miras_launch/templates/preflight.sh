say "looking at the machines"
on_all_ranks doctor.log @@doctor
code=$?
if [ "$code" -ne 0 ]; then
  say "miras-doctor ended with exit code $code, so nothing is trained:"
  tail -n 20 "$log_dir/doctor.log"
  finish "$((code == 1 ? 6 : code))"   # 1 would be a fault of the program
fi
